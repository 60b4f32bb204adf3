"""Meshes whose manifest, lock or segment was damaged from outside: the living are left alone, the dead swept."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

# `tests/cli` has each damage by itself, in CI; meshes are started there for those that leave no manifest.
pytestmark = pytest.mark.process

ECHO = ("--model", "echo", "--mixed", "1")


def segment(host, group):
    return Path(f"/dev/shm/kvmesh-{os.getuid()}.{host.name}.{group}")


def is_pending(number, pid):
    [shared] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("ShdPnd")]
    return int(shared.split()[1], 16) >> (number - 1) & 1


@pytest.mark.slow
def test_a_manifest_that_was_damaged_is_written_again(host):
    mesh = host.up(*ECHO)
    host.wait_until(lambda: "ready at" in mesh.log.read_text(), "no actor starts any more")
    (host.run_directory / "manifest.json").write_bytes(b"\xff garbage")
    host.wait_until(lambda: host.meshctl("probe", "live").returncode == 0, "the mesh is found again")
    assert "the manifest was damaged or gone: it has been written again" in mesh.log.read_text()
    assert host.meshctl("down").returncode == 0
    mesh.wait(10)
    host.assert_nothing_left()


def test_a_living_mesh_is_found_and_stopped_without_its_manifest(host):
    mesh = host.up(*ECHO)
    host.wait_until(lambda: "ready at" in mesh.log.read_text(), "no actor starts any more")
    # Stopped, or it would write the manifest again.
    os.kill(mesh.pid, signal.SIGSTOP)
    (host.run_directory / "manifest.json").write_bytes(b"\xff garbage")
    again = host.meshctl("up", *ECHO)
    assert again.returncode == 4, again.stderr
    assert f"process {mesh.pid}" in again.stderr
    listed = host.meshctl("ps")
    assert listed.returncode == 1
    assert f"process {mesh.pid}" in listed.stderr
    assert "manifest.json" in listed.stderr
    assert "Traceback" not in again.stderr + listed.stderr
    assert host.say("unharmed") == "unharmed"
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(host.meshctl, "down")
        host.wait_until(lambda: is_pending(signal.SIGTERM, mesh.pid), "it is told to stop by a signal")
        os.kill(mesh.pid, signal.SIGCONT)
        stopped = stopping.result()
    assert stopped.returncode == 0, stopped.stderr
    assert f"process {mesh.pid} instead" in stopped.stderr
    mesh.wait(10)
    host.assert_nothing_left()


@pytest.mark.slow
def test_a_living_mesh_whose_lock_was_removed_is_not_swept(host):
    mesh = host.up(*ECHO)
    before = host.pids()
    (host.run_directory / "lock").unlink()
    for extra in ((), ("-d",)):
        again = host.meshctl("up", *ECHO, *extra)
        assert again.returncode == 4, again.stderr
        assert f"process {mesh.pid}, at {host.url}" in again.stderr
    assert {actor_id: entry["pid"] for actor_id, entry in host.ps().items()} == before
    assert host.say("unharmed") == "unharmed"
    assert host.meshctl("down").returncode == 0
    mesh.wait(10)
    host.assert_nothing_left()


def test_a_dead_mesh_is_swept_without_its_manifest(host):
    mesh = host.up(*ECHO)
    mesh.kill()
    mesh.wait()
    host.wait_until(lambda: not host.processes(), "its actors have ended")
    (host.run_directory / "manifest.json").write_text("{")
    segment(host, "prefill-7").write_bytes(b"what another topology left")
    again = host.up(*ECHO)
    said = again.log.read_text()
    assert "removed what an earlier supervisor left: a manifest that cannot be used" in said
    assert f"segment {segment(host, 'prefill-7')}" in said
    assert host.say("clean again") == "clean again"
    assert host.meshctl("down").returncode == 0
    again.wait(10)
    host.assert_nothing_left()


def test_a_segments_name_that_something_else_has(host):
    segment(host, "mixed-0").mkdir()
    try:
        failed = host.meshctl("up", *ECHO, "--port", str(host.port))
    finally:
        segment(host, "mixed-0").rmdir()
    assert failed.returncode == 5, failed.stderr
    assert str(segment(host, "mixed-0")) in failed.stderr
    assert "another --name" in failed.stderr
    assert "Traceback" not in failed.stderr
    host.assert_nothing_left(within_s=1.0)

import os
import subprocess
import sys

import pytest

from cli.errors import AlreadyRunning, CliError
from cli.supervisor import mesh_directory
from cli.supervisor.mesh_directory import Manifest, MeshDirectory, ProcessRecord, StartError, segment_prefix
from cli.supervisor.processes import open_process, start_time, wait_dead
from cli.supervisor.sweep import kill_all, sweep
from mesh.address import Address
from tests.cli.refused import refused


def manifest(directory, processes=()):
    return Manifest(
        mesh="m",
        pid=os.getpid(),
        start_time=start_time(os.getpid()),
        epoch=1,
        control="ipc:///c",
        data="ipc:///d",
        url="http://x",
        model="echo",
        pool_directory=str(directory.path),
        pool_prefix=segment_prefix(os.getuid(), "m"),
        started_at=0.0,
        processes=list(processes),
    )


def test_nobody_else_may_enter(directory):
    for path in directory.path.parent, directory.path, directory.run.sockets, directory.logs:
        assert path.stat().st_mode & 0o777 == 0o700
    directory.create()
    directory.path.chmod(0o755)
    with refused(CliError, "cannot be used", do="remove it"):
        directory.create()


def test_a_directory_that_cannot_be_made(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    with pytest.raises(CliError, match="cannot be made"):
        MeshDirectory("m").create()


def test_one_supervisor_at_a_time(directory):
    with directory.locked():
        with pytest.raises(AlreadyRunning, match="it is starting"), directory.locked():
            pass
        directory.write_manifest(manifest(directory))
        with pytest.raises(AlreadyRunning, match=f"process {os.getpid()}, at http://x"), directory.locked():
            pass
    with directory.locked():
        pass


def test_epochs_are_kept_and_never_go_back(directory):
    assert directory.epochs() == {}
    directory.issue("a", 1)
    directory.issue("b", 4)
    directory.issue("a", 3)
    directory.issue("a", 2)
    assert MeshDirectory("m").epochs() == {"a": 3, "b": 4}


@pytest.mark.parametrize(
    "content", [b"{", b"", b'{"\xff": 1}', b'{"worker-0": -1}', b'{"worker-0": 99999999999999999999}', b"[" * 100_000]
)
def test_epochs_grow_over_lost_files_and_over_clocks_that_go_back(directory, content, monkeypatch):
    now = 1_700_000_000.9
    monkeypatch.setattr(mesh_directory.time, "time", lambda: now)
    assert directory.last_epoch("worker-0") == 1_700_000_000, "never issued"
    directory.issue("worker-0", 1_700_000_012)
    assert directory.last_epoch("worker-0") == 1_700_000_012, "restarts were faster than the clock"
    now -= 86_400
    assert directory.last_epoch("worker-0") == 1_700_000_012, "the file is right where the clock is not"
    now += 2 * 86_400
    (directory.path / "epochs.json").write_bytes(content)
    assert directory.last_epoch("worker-0") == 1_700_086_400, "the clock is where the file is gone"


def test_manifest_comes_back_and_damage_is_none(directory):
    assert directory.read_manifest() is None
    written = manifest(directory, [ProcessRecord(actor_id="a", role="r", epoch=1, pid=2, start_time=3)])
    directory.write_manifest(written)
    assert directory.read_manifest() == written
    assert written.supervisor[0] == Address("supervisor", 1)
    (directory.path / "manifest.json").write_text("[]")
    assert directory.read_manifest() is None


def test_pipes_in_place_of_its_files_hold_nobody_up(directory):
    address = Address("a", 2)
    for name in ("epochs.json", "actors.json", "manifest.json", "errors/a.2.json"):
        os.mkfifo(directory.path / name)
    found = directory.epochs(), directory.actors(), directory.read_manifest(), directory.take_error(address)
    assert found == ({}, {}, None, None)
    assert directory.issue("a", 3)
    assert directory.epochs() == {"a": 3}


def test_errors_are_taken_once(directory):
    address = Address("a", 2)
    assert directory.take_error(address) is None
    directory.write_error(address, StartError("cannot_bind", "taken"))
    assert directory.take_error(Address("a", 1)) is None
    (directory.path / "errors" / "a.1.json").write_bytes(b'["\xff", "x"]')
    assert directory.take_error(Address("a", 1)) is None
    assert directory.take_error(address) == StartError("cannot_bind", "taken")
    assert directory.take_error(address) is None


def test_all_names(directory):
    MeshDirectory("n").create()
    assert MeshDirectory.all_names() == ["m", "n"]


def sleeper():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def test_sweep_kills_only_the_process_that_is_meant(directory):
    mine, other = sleeper(), sleeper()
    try:
        records = [
            ProcessRecord(actor_id="mine", role="r", epoch=1, pid=mine.pid, start_time=start_time(mine.pid)),
            ProcessRecord(actor_id="reused", role="r", epoch=1, pid=other.pid, start_time=1),
            ProcessRecord(actor_id="gone", role="r", epoch=1, pid=2**22 - 1, start_time=1),
        ]
        (directory.run.sockets / "a.1.c").touch()
        segment, other_segment = (
            directory.path / f"{segment_prefix(os.getuid(), mesh)}decode" for mesh in ("m", "m-x")
        )
        segment.touch()
        other_segment.touch()
        (directory.path / "errors" / "a.1.json").touch()
        directory.run.registry_file.touch()
        directory.write_manifest(manifest(directory, records))
        found = sweep(directory)
        assert found[:2] == [f"process {mine.pid} (mine)", "socket a.1.c"]
        assert found[2] == f"segment {segment}"
        assert mine.wait() == -9
        assert other.poll() is None
        assert directory.read_manifest() is None
        assert other_segment.exists()
        assert not directory.run.registry_file.exists()
        assert sweep(directory) == []
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()


def test_waiting_for_a_death():
    process = sleeper()
    descriptor = open_process(process.pid, start_time(process.pid))
    try:
        assert not wait_dead(descriptor, 0.0)
        process.kill()
        assert wait_dead(descriptor, 10.0)
    finally:
        os.close(descriptor)
        process.wait()
    assert open_process(process.pid, 1) is None
    assert kill_all([]) == []

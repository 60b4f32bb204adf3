"""Manifests that are damaged, another's, or of a mesh that lives: nothing is done by them that must not be done."""

import os
import random
import signal
import tempfile
import time

import pytest

from cli.client import find_mesh
from cli.commands.down import down
from cli.commands.ps import ps
from cli.errors import AlreadyRunning, BadManifest, CliError, NotRunning
from cli.supervisor.kept.mesh_directory import MeshDirectory, segment_prefix
from cli.supervisor.kept.sweep import kill_all, sweep
from cli.supervisor.processes import by_pid as processes
from cli.supervisor.processes.by_pid import Process, is_alive, open_process, start_time
from tests.cli.manifests import PREFIX, manifest, record
from tests.cli.refused import refused

SHM = "/dev/shm"


@pytest.fixture
def directory(monkeypatch):
    # Not tmp_path: `down` binds sockets there, whose paths end at 99 bytes, and pytest's name the worker and the test.
    with tempfile.TemporaryDirectory(prefix="kvmesh-", dir="/tmp") as base:
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        directory = MeshDirectory("m")
        directory.create()
        yield directory


def put(directory, content):
    (directory.path / "manifest.json").write_bytes(content)


GARBAGE = {
    "empty": b"",
    "cut off": b'{"mesh": "m", "pid": 1',
    "no object": b"[]",
    "noise": bytes(range(256)) * 40,
    "too deep": b"[" * 200_000,
    "other types": b'{"mesh": "m", "pid": "1"}',
    "fields missing": b'{"mesh": "m", "pid": 1}',
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_refused_and_its_mesh_swept_all_the_same(directory, content, capfd):
    put(directory, content)
    with refused(BadManifest, r"manifest.json cannot be used", do="meshctl down --name m"):
        directory.load_manifest()
    assert directory.read_manifest() is None
    with pytest.raises(BadManifest):
        find_mesh("m")
    (directory.run.sockets / "a.1.c").touch()
    assert down("m", force=False, timeout_s=1.0) == 0
    said = capfd.readouterr().err
    assert "a manifest that cannot be used" in said
    assert "socket a.1.c" in said
    assert directory.load_manifest() is None
    with pytest.raises(NotRunning):
        down("m", force=False, timeout_s=1.0)


@pytest.mark.parametrize("content", [None, b"{"], ids=["none", "damaged"])
def test_segments_in_a_directory_of_ones_own_are_swept_though_no_manifest_names_it(directory, tmp_path, content):
    pools = tmp_path / "pools"
    pools.mkdir()
    for name in (f"{PREFIX}decode-0", "somebody-elses"):
        (pools / name).touch()
    directory.write_config("kv-agent-0", {"pools": [], "directory": str(pools)})
    if content is not None:
        put(directory, content)
    assert f"segment {pools}/{PREFIX}decode-0" in sweep(directory)
    assert [path.name for path in pools.iterdir()] == ["somebody-elses"]
    # Nobody's word is taken for more than where to look.
    for config in (b"[]", b'{"directory": 5}', b'{"directory": "pools"}'):
        (directory.path / "configs" / "kv-agent-0.json").write_bytes(config)
        assert directory.pool_directory() == "/dev/shm"


def test_a_manifest_cut_or_changed_anywhere_is_sound_or_refused(directory):
    dice = random.Random(4)
    directory.write_manifest(manifest(directory, processes=[]))
    whole = (directory.path / "manifest.json").read_bytes()
    contents = [whole[:cut] for cut in range(len(whole))]
    for _ in range(500):
        changed = bytearray(whole)
        changed[dice.randrange(len(whole))] = dice.randrange(256)
        contents.append(bytes(changed))
    for content in contents:
        put(directory, content)
        try:
            found = directory.load_manifest()
        except BadManifest:
            continue
        assert (found.mesh, found.pool_prefix) == ("m", PREFIX)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"mesh": "n"}, "manifest of a mesh named 'n'"),
        ({"pool_prefix": ""}, "that begin with ''"),
        ({"pool_prefix": segment_prefix(os.getuid(), "n")}, "kvmesh-"),
        ({"pool_directory": "."}, "names segments in '.'"),
    ],
)
def test_what_is_not_of_this_mesh_is_not_touched_by_it(directory, stranger, fields, why):
    """All of it is well-formed: followed, it would remove a directory's files and kill a process."""
    bystander = directory.path / "kvmesh-bystander"
    bystander.touch()
    directory.write_manifest(manifest(directory, processes=[record(stranger)], **fields))
    with pytest.raises(BadManifest) as caught:
        directory.load_manifest()
    assert why in caught.value.why
    assert sweep(directory) == [
        f"a manifest that cannot be used, so its actors are left to end by themselves ({caught.value.why})"
    ]
    assert bystander.exists()
    assert stranger.poll() is None


def test_segments_are_found_by_the_name_of_the_mesh_where_no_manifest_names_them(directory, monkeypatch):
    name = f"t{os.getpid()}"
    other = MeshDirectory(name)
    other.create()
    put(other, b"{")
    segment = f"{SHM}/{segment_prefix(os.getuid(), name)}decode-0"
    with open(segment, "wb"):
        pass
    try:
        assert sweep(other)[1:] == [f"segment {segment}"]
        assert not os.path.exists(segment)
    finally:
        if os.path.exists(segment):
            os.unlink(segment)


def make_link(path):
    path.symlink_to("/etc/passwd")


def give_away(path):
    path.write_bytes(b"{}")
    os.chown(path, 12345, 12345)


OTHERS = {"a link": make_link, "a pipe": os.mkfifo, "a directory": lambda path: path.mkdir(), "given": give_away}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_what_is_no_file_of_this_users_is_not_read(directory, make):
    try:
        make(directory.path / "manifest.json")
    except PermissionError:
        pytest.skip("only root can give files away")
    with pytest.raises(BadManifest):
        directory.load_manifest()


def test_another_users_run_directory_is_refused(directory, stranger):
    """Whoever made it first could have meshctl kill what they like."""
    directory.write_manifest(manifest(directory, stranger))
    try:
        os.chown(directory.path, 12345, 12345)
    except PermissionError:
        directory.path.chmod(0o777)
    for look in (directory.load_manifest, directory.create, lambda: down("m", force=True, timeout_s=1.0)):
        with refused(CliError, "cannot be used", why="another user owns it"):
            look()
    assert stranger.poll() is None


def test_the_manifest_of_a_living_mesh_is_not_swept_though_its_lock_is_free(directory, stranger):
    """Somebody removed the lock file: the supervisor lives, and its actors with it."""
    directory.write_manifest(manifest(directory, stranger))
    (directory.run.sockets / "a.1.c").touch()
    with refused(AlreadyRunning, why=f"process {stranger.pid}, at http://x"), directory.locked():
        sweep(directory)
    assert stranger.poll() is None
    assert (directory.run.sockets / "a.1.c").exists()
    assert directory.load_manifest() is not None


@pytest.mark.parametrize("pid", [0, -1, 2**31, 2**63, -(2**63)])
def test_pids_that_no_process_has(directory, pid):
    directory.write_manifest(manifest(directory, pid=pid))
    nobody = record(Process(pid, 0), start_time=0)
    assert kill_all([nobody]) == []
    assert not is_alive(pid, 0)
    assert down("m", force=False, timeout_s=1.0) == 0


def test_strangers_with_the_pids_of_dead_actors_live_on(directory, stranger, monkeypatch):
    """Started at another time; or not to be signalled; or this very process."""
    later = record(stranger, start_time=start_time(stranger.pid) - 1)
    myself = record(Process.of(os.getpid()), actor_id="me")
    directory.write_manifest(manifest(directory, processes=[later, myself]))
    assert sweep(directory) == []
    real = signal.pidfd_send_signal

    def refuse(descriptor, number):
        if number == 0:
            raise PermissionError
        real(descriptor, number)

    monkeypatch.setattr(processes.signal, "pidfd_send_signal", refuse)
    assert kill_all([record(stranger)]) == []
    assert stranger.poll() is None


def test_a_process_that_ended_and_was_not_waited_for_is_dead(stranger):
    known = record(stranger)
    stranger.kill()
    os.waitid(os.P_PID, stranger.pid, os.WEXITED | os.WNOWAIT)
    assert open_process(known.pid, known.start_time) is None


def test_a_process_that_ends_just_before_it_is_killed(stranger, monkeypatch):
    known = record(stranger)
    real = signal.pidfd_send_signal

    def late(descriptor, number):
        if number == signal.SIGKILL:
            stranger.kill()
            stranger.wait()
        real(descriptor, number)

    monkeypatch.setattr(signal, "pidfd_send_signal", late)
    assert kill_all([known]) == [known]


def test_what_was_removed_already_is_not_missed(directory):
    directory.write_manifest(manifest(directory, pool_directory="/nowhere"))
    directory.run.sockets.rmdir()
    assert sweep(directory) == []
    assert directory.load_manifest() is None


def test_what_cannot_be_removed_is_reported_and_the_rest_goes(directory):
    (directory.run.sockets / "a").mkdir()
    (directory.run.sockets / "b.1.c").touch()
    stays, goes = sweep(directory)
    assert stays.startswith("socket a, which cannot be removed: ")
    assert goes == "socket b.1.c"


def test_down_of_what_is_not_there(directory):
    for name in ("m", "never"):
        with pytest.raises(NotRunning, match=f"no mesh named '{name}' is running"):
            down(name, force=False, timeout_s=1.0)


@pytest.mark.parametrize("content", [None, b"{"], ids=["none yet", "damaged"])
def test_down_reaches_a_supervisor_by_its_lock(directory, stranger, content, capfd):
    if content is not None:
        put(directory, content)
    (directory.path / "lock").write_text(f"{stranger.pid} {start_time(stranger.pid)}\n")
    assert down("m", force=False, timeout_s=10.0) == 0
    assert f"sending a signal to process {stranger.pid} instead" in capfd.readouterr().err
    assert stranger.wait() == -signal.SIGTERM


def test_down_by_force_kills_a_supervisor_that_does_not_answer_at_once(directory, stranger, capfd):
    directory.write_manifest(manifest(directory, stranger))
    (directory.run.sockets / "a.1.c").touch()
    stranger.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert down("m", force=True, timeout_s=30.0) == 0
    assert time.monotonic() - began < 15.0, "it does not wait for the timeout"
    assert stranger.wait() == -signal.SIGKILL
    said = capfd.readouterr().err
    assert f"does not answer; killing process {stranger.pid}" in said
    assert "socket a.1.c" in said


def test_ps_says_that_the_manifest_of_a_running_mesh_is_damaged_and_who_holds_its_lock(directory, stranger):
    put(directory, b"{")
    (directory.path / "lock").write_text(f"{stranger.pid} {start_time(stranger.pid)}\n")
    for name in (None, "m"):
        with refused(BadManifest, why=f"process {stranger.pid}, holds the lock", do="meshctl down --name m"):
            ps(name, "table")
    stranger.kill()
    stranger.wait()
    with pytest.raises(NotRunning, match="no mesh"):
        ps(None, "table")


def test_the_lock_says_who_holds_it(directory):
    assert directory.holder() is None
    with directory.locked():
        assert directory.holder() is None, "whoever only sweeps is no supervisor"
        directory.sign_lock()
        assert directory.holder() == (os.getpid(), start_time(os.getpid()))
        put(directory, b"{")
        with refused(AlreadyRunning, why=f"process {os.getpid()}"), directory.locked():
            pass
    for content in ("", "x", "1 2 3", "1 x"):
        (directory.path / "lock").write_text(content)
        assert directory.holder() is None

import contextlib
import os

import msgspec
import pytest

from cli.commands import run as run_command
from cli.errors import AlreadyRunning, CliError
from cli.supervisor.forks import role
from cli.supervisor.kept import mesh_directory
from cli.supervisor.kept.mesh_directory import MeshDirectory, segment_prefix
from cli.supervisor.kept.sweep import kill_all, sweep
from cli.supervisor.processes.by_pid import Process, open_process, start_time, wait_dead
from mesh.address import Address
from mesh.errors import ActorFailed, CoreFailed, DrainFailed
from mesh.runtime.run_directory import HostRecord
from mesh.runtime.supervisor_line import SupervisorEnd
from tests.cli.manifests import NO_PID, manifest, record
from tests.cli.refused import refused


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
        directory.write_manifest(manifest(directory, Process.of(os.getpid())))
        with pytest.raises(AlreadyRunning, match=f"process {os.getpid()}, at http://x"), directory.locked():
            pass
    with directory.locked():
        pass


def test_a_second_host_in_one_run_directory_is_told_to_have_its_own(directory):
    own = Process.of(os.getpid())
    of_host = {"supervisor_id": "supervisor.d", "pool_prefix": segment_prefix(os.getuid(), "m", "d")}
    do = ("meshctl down --host d --name m", "an XDG_RUNTIME_DIR of its own")
    directory.run.write_host(HostRecord("d", "127.0.0.1", "127.0.0.1"))
    with directory.locked():
        what = "host d of the mesh 'm' is running"
        with refused(AlreadyRunning, what, why="it is starting", do=do), directory.locked():
            pass
        directory.write_manifest(manifest(directory, own, **of_host, processes=[record(own, role="worker")]))
        with pytest.raises(AlreadyRunning) as caught, directory.locked():
            pass
        assert caught.value.why == f"its supervisor is process {own.pid}, and uses the run directory {directory.path}"
        directory.write_manifest(manifest(directory, own, **of_host, processes=[record(own, role="gateway")]))
        with refused(AlreadyRunning, why=f"process {own.pid}, at http://x"), directory.locked():
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
    told = []
    directory.issue("worker-1", 1_700_086_401, told.append)
    directory.issue("worker-0", 1_700_086_401, told.append)
    (line,) = told
    assert line.startswith(f"{directory.path}/epochs.json is damaged (")
    assert line.endswith("): it is written anew, and epochs go on from the clock")


def test_an_actor_run_by_hand_says_it_too(directory, monkeypatch, capsys):
    monkeypatch.setattr(run_command, "run_role", lambda run: 0)
    (directory.path / "epochs.json").write_text("{")
    assert run_command.run(["detokenizer", "--name", "m"]) == 0
    assert f"{directory.path}/epochs.json is damaged (" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [CoreFailed("detokenizer", "its core is broken"), DrainFailed("it cannot drain"), ActorFailed("its device failed")],
)
def test_an_actor_that_breaks_says_why_to_its_supervisor(directory, monkeypatch, error):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(role, "run_actor", fails)
    line = SupervisorEnd()
    try:
        order = role.RoleRun(mesh="m", role="detokenizer", actor_id="d", epoch=3, config={"model": "echo"})
        line.give_order(msgspec.msgpack.encode(order))
        assert role.run_ordered(line.theirs.fileno()) == 1
        assert line.read(lambda _: None)
        said = msgspec.msgpack.decode(line.last_words, type=role.LastWords)
    finally:
        line.close()
    assert said == role.LastWords(error.message, core=getattr(error, "core", ""))


def test_an_actor_whose_supervisor_is_gone_before_it_begins_is_nobody(directory):
    line = SupervisorEnd()
    theirs = os.dup(line.theirs.fileno())
    line.close()
    try:
        assert role.run_ordered(theirs) == 0
    finally:
        os.close(theirs)


@pytest.mark.parametrize(("forced", "code"), [(0, 0), (1, 10)])
def test_an_actor_that_had_to_break_off_its_drain_says_so_by_its_exit_code(directory, monkeypatch, forced, code):
    monkeypatch.setattr(role, "run_actor", lambda *_, **__: forced)
    actor_run = role.RoleRun(mesh="m", role="detokenizer", actor_id="d", epoch=3, config={"model": "echo"})
    assert role.run_role(actor_run) == code


@pytest.mark.parametrize("fault", ["", "refused", "a config that is none", "a role that cannot start"])
def test_an_actor_run_by_hand_leaves_no_directory_that_nobody_uses(directory, monkeypatch, fault):
    def ends(run):
        assert MeshDirectory("new").epochs() == {"detokenizer": run.epoch}
        if fault == "refused":
            raise CliError("no", why="no", do="no")
        return 0

    if fault != "a role that cannot start":
        monkeypatch.setattr(run_command, "run_role", ends)
    config = {"a config that is none": "{", "a role that cannot start": '{"model": 1}'}.get(fault, "{}")
    with contextlib.suppress(CliError):
        run_command.run(["detokenizer", "--name", "new", "--config", config])
    new = MeshDirectory("new")
    assert not new.path.exists()
    assert directory.path.exists(), "another mesh's"


@pytest.mark.parametrize("used", ["s/d.1.c", "logs/x.log", "registry.json", "lock", "configs/d.json"])
def test_a_directory_that_others_use_stays_as_it_is(directory, used):
    (directory.path / used).touch()
    before = sorted(directory.path.rglob("*"))
    directory.issue("d", 1)
    directory.remove_unused()
    left = sorted(directory.path.rglob("*"))
    assert {*before} - {*left} <= {directory.run.sockets, directory.logs, directory.path / "configs"}
    assert (directory.path / used).exists()
    assert directory.epochs() == {"d": 1}


def test_the_first_epochs_of_a_mesh_are_no_damage(directory):
    told = []
    directory.issue("worker-0", 1, told.append)
    assert told == []


def test_manifest_comes_back_and_damage_is_none(directory):
    assert directory.read_manifest() is None
    written = manifest(directory, processes=[record(Process(2, 3), start_time=3)])
    directory.write_manifest(written)
    assert directory.read_manifest() == directory.load_manifest() == written
    assert written.supervisor[0] == Address("supervisor", 1)
    (directory.path / "manifest.json").write_text("[]")
    assert directory.read_manifest() is None


def test_pipes_in_place_of_its_files_hold_nobody_up(directory):
    for name in ("epochs.json", "actors.json", "manifest.json"):
        os.mkfifo(directory.path / name)
    assert (directory.epochs(), directory.actors(), directory.read_manifest()) == ({}, {}, None)
    directory.issue("a", 3)
    assert directory.epochs() == {"a": 3}


def test_all_names(directory):
    MeshDirectory("n").create()
    assert MeshDirectory.all_names() == ["m", "n"]


def test_sweep_kills_only_the_process_that_is_meant(directory, start_stranger):
    mine, other = start_stranger(), start_stranger()
    gone = Process(NO_PID, 1)
    records = [record(mine, actor_id="mine"), record(other, start_time=1), record(gone, start_time=1)]
    (directory.run.sockets / "a.1.c").touch()
    segment, other_segment = (directory.path / f"{segment_prefix(os.getuid(), mesh)}decode" for mesh in ("m", "m-x"))
    for path in (segment, other_segment, directory.run.registry_file):
        path.touch()
    directory.write_manifest(manifest(directory, processes=records))
    assert sweep(directory) == [f"process {mine.pid} (mine)", "socket a.1.c", f"segment {segment}"]
    assert mine.wait() == -9
    assert other.poll() is None
    assert directory.read_manifest() is None
    assert other_segment.exists()
    assert not directory.run.registry_file.exists()
    assert sweep(directory) == []


def test_waiting_for_a_death(stranger):
    descriptor = open_process(stranger.pid, start_time(stranger.pid))
    try:
        assert not wait_dead(descriptor, 0.0)
        stranger.kill()
        assert wait_dead(descriptor, 10.0)
    finally:
        os.close(descriptor)
    stranger.wait()
    assert open_process(stranger.pid, 1) is None
    assert kill_all([]) == []

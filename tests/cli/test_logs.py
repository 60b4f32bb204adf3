"""`meshctl logs` over files as actors leave them: one stream in order of time, chosen and written for whoever reads."""

import asyncio
import contextlib
import itertools
import json
import signal
import sys
from datetime import datetime, timedelta

import pytest

from cli.commands import logs as command
from cli.commands.logs import Wanted, logs
from cli.errors import NotRunning, TryAgain, WrongUsage
from cli.exit_codes import ExitCode
from cli.log_lines import parse_since, read_lines, to_text
from cli.protocol import LogList, ReadLogs
from cli.supervisor.kept.log_files import log_roles, read_logs, rotate
from cli.supervisor.kept.mesh_directory import MeshDirectory
from mesh.runtime.run_directory import HostRecord

START = datetime(2026, 3, 1, 12, 0, 0)


def entry(actor, seconds, event, level="info", **fields):
    at = (START + timedelta(seconds=seconds)).isoformat() + "Z"
    return json.dumps({"actor": actor, "epoch": 1, **fields, "event": event, "level": level, "timestamp": at}) + "\n"


@pytest.fixture
def mesh(directory):
    """A directory with logs of three actors, one of them of an earlier topology."""
    directory.write_actors({"supervisor": "supervisor", "gateway-0": "gateway", "worker-0": "worker"})
    directory.log("gateway-0").write_text(
        entry("gateway-0", 1, "joined") + entry("gateway-0", 4, "slow", "warning", what="a b", n=3)
    )
    directory.log("worker-0").write_text(
        entry("worker-0", 2, "joined")
        + "WARNING torch no such thing\nSegmentation fault\n"
        + entry("worker-0", 5, "stopped", "error", exception="Traceback:\n  boom")
    )
    directory.log("worker-7").write_text(entry("worker-7", 3, "of an earlier mesh"))
    return directory


def shown(capsys, *names, output="json", follow=False, **wanted):
    assert logs("m", Wanted(names=names, **wanted), follow=follow, output=output) is ExitCode.OK
    return capsys.readouterr().out.splitlines()


def events(lines):
    return [json.loads(line)["event"] for line in lines]


def test_one_stream_in_order_of_time_of_this_topology_only(mesh, capsys):
    lines = shown(capsys)
    assert events(lines) == ["joined", "joined", "WARNING torch no such thing", "Segmentation fault", "slow", "stopped"]
    assert [json.loads(line)["actor"] for line in lines] == ["gateway-0", *["worker-0"] * 3, "gateway-0", "worker-0"]
    assert events(shown(capsys, num_lines=2)) == ["slow", "stopped"]
    assert events(shown(capsys, num_lines=0)) == []


def test_by_actor_role_level_and_time(mesh, capsys):
    assert events(shown(capsys, "gateway-0")) == events(shown(capsys, "gateway")) == ["joined", "slow"]
    assert len(shown(capsys, "worker", "gateway-0")) == 6
    loud = ["WARNING torch no such thing", "Segmentation fault", "slow", "stopped"]
    assert events(shown(capsys, level="warning")) == loud
    assert events(shown(capsys, level="error")) == ["Segmentation fault", "stopped"]
    assert events(shown(capsys, since="2026-03-01T12:00:03+00:00")) == ["slow", "stopped"]
    assert shown(capsys, since="1s") == []


def test_a_terminal_gets_text_and_a_pipe_json(mesh, capsys, monkeypatch):
    assert events(shown(capsys, output=None))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = shown(capsys, output=None)
    slow = next(line for line in lines if "slow" in line)
    assert slow.startswith("\x1b[33m")
    assert slow.removesuffix("\x1b[0m").endswith("gateway-0   warning  slow  what='a b'  n=3")
    assert lines[-1] == "  boom\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in "".join(shown(capsys, output=None))


def test_what_is_of_today_has_no_date():
    now = datetime.now().astimezone()
    text = json.dumps({"timestamp": now.isoformat(), "event": "e", "level": "info", "x": {"y": 1}})
    (line,) = read_lines("a", [text], 0.0)
    when = f"{now:%H:%M:%S}.{now.microsecond // 1000:03}"
    assert to_text(line, 3, colours=False) == when + '  a    info     e  x={"y":1}'


def test_following_goes_on_through_new_lines_cut_files_and_late_actors(mesh, capsys, monkeypatch):
    later = mesh.log("supervisor")
    steps = iter(
        [
            lambda: later.write_text(entry("supervisor", 9, "a death") + entry("supervisor", 10, "half a line")[:-5]),
            lambda: later.write_text(entry("supervisor", 9, "a death") + entry("supervisor", 10, "half a line")),
            lambda: later.write_text(entry("supervisor", 11, "cut")),
        ]
    )

    async def next_step(_):
        step = next(steps, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr(command.asyncio, "sleep", next_step)
    assert events(shown(capsys, "supervisor", follow=True)) == ["a death", "half a line", "cut"]


def test_few_lines_of_a_long_file_are_its_last_and_the_rotated_one_comes_before(mesh, capsys):
    mesh.log("gateway-0").write_text("".join(entry("gateway-0", second, f"e{second}") for second in range(5000)))
    assert events(shown(capsys, "gateway", num_lines=3)) == ["e4997", "e4998", "e4999"]
    assert len(shown(capsys, "gateway", num_lines=4999)) == 4999
    rotated = mesh.log("gateway-0").with_name("gateway-0.log.1")
    rotated.write_text(entry("gateway-0", -2, "first") + entry("gateway-0", -1, "second"))
    assert events(shown(capsys, "gateway", num_lines=5001))[:2] == ["second", "e0"]
    assert len(shown(capsys, "gateway", level="info", num_lines=9000)) == 5002


class OtherHosts:
    """What the supervisor of host `a` passes on to that of `b`, which is another directory; it may be cut off."""

    def __init__(self, base, monkeypatch):
        self.silent = False
        self.hosts = ["b"]
        self.asked = []
        with monkeypatch.context() as patch:
            patch.setenv("XDG_RUNTIME_DIR", str(base))
            self.directory = MeshDirectory("m")
        self.directory.create()
        self.why = "the supervisor of b: no answer"
        self.directory.run.write_host(HostRecord("b", "127.0.0.1", "127.0.0.1"))
        self.directory.write_actors({"supervisor": "supervisor", "worker-0.b": "worker"})
        monkeypatch.setattr(command, "find_mesh", lambda name: None)
        monkeypatch.setattr(command, "connected", self.connected)

    @contextlib.asynccontextmanager
    async def connected(self, _mesh):
        yield self.ask

    async def ask(self, question, _type, *_):
        """As `SupervisorActor` answers."""
        here = self.directory
        self.asked.append(question)
        if question.host == "":
            return LogList(roles={}, hosts=self.hosts)
        assert question.host == "b"
        if self.silent:
            raise TryAgain("no", why=self.why, do="wait")
        return read_logs(here, question) if isinstance(question, ReadLogs) else LogList(roles=log_roles(here))


@pytest.fixture
def other(mesh, tmp_path, monkeypatch):
    mesh.run.write_host(HostRecord("a", "127.0.0.1", "127.0.0.1"))
    (tmp_path / "b").mkdir()
    return OtherHosts(tmp_path / "b", monkeypatch)


def test_other_hosts_logs_come_by_their_supervisors(mesh, other, capsys):
    mesh.log("supervisor").write_text(entry("supervisor.a", 6, "here"))
    other.directory.log("worker-0.b").write_text(entry("worker-0.b", 3, "there"))
    other.directory.log("supervisor").write_text(entry("supervisor.b", 7, "there, too"))
    assert events(shown(capsys, "supervisor", "worker", num_lines=4)) == ["there", "stopped", "here", "there, too"]
    assert "supervisor.b  info     there, too" in shown(capsys, "supervisor.b", output="text")[0]
    # More than one answer takes.
    lines = "".join(entry("worker-0.b", second, f"e{second}", padding="x" * 1000) for second in range(3000))
    other.directory.log("worker-0.b").write_text(lines)
    other.asked.clear()
    assert events(shown(capsys, "worker-0.b", level="info", num_lines=2999)) == [f"e{n}" for n in range(1, 3000)]
    assert len(other.asked) == 6
    assert other.directory.log("worker-0.b").read_text() == lines


def test_a_host_that_does_not_answer_is_named_and_goes_on_when_it_does(mesh, other, capsys, monkeypatch):
    log = other.directory.log("worker-0.b")
    log.write_text(entry("worker-0.b", 1, "e1"))

    def write(text):
        with log.open("a") as file:
            file.write(text)

    def cut_off():
        other.silent = True
        write(entry("worker-0.b", 2, "e2") + entry("worker-0.b", 3, "e3"))

    def healed():
        rotate(other.directory.logs, max_bytes=1)
        write(entry("worker-0.b", 4, "e4")[:-5])
        other.silent = False

    steps = iter([cut_off, lambda: None, healed, lambda: write(entry("worker-0.b", 4, "e4")[-5:])])
    polls, sleep = itertools.count(), asyncio.sleep

    async def next_step(seconds):
        # Both hosts are polled in turns; who joins is looked for less often.
        await sleep(0 if seconds < 1.0 else 60.0)
        if next(polls) % 2:
            step = next(steps, None)
            if step is None:
                raise KeyboardInterrupt
            step()

    monkeypatch.setattr(command.asyncio, "sleep", next_step)
    assert logs("m", Wanted(names=("worker-0.b",)), follow=True, output="json") is ExitCode.OK
    told = capsys.readouterr()
    assert events(told.out.splitlines()) == ["e1", "e2", "e3", "e4"], "nothing is lost by a file cut meanwhile"
    assert told.err == "the logs of host b are left out: the supervisor of b: no answer\nhost b answers again\n"
    other.silent, other.why = True, "host b is not in the mesh"
    assert logs("m", Wanted(names=("gateway",)), follow=False, output="json") is ExitCode.OK
    told = capsys.readouterr()
    assert events(told.out.splitlines()) == ["joined", "slow"]
    assert told.err == "the logs of host b are left out: host b is not in the mesh\n"
    with pytest.raises(WrongUsage, match=r"no log of worker-0.b"):
        logs("m", Wanted(names=("worker-0.b",)), follow=False, output=None)


@pytest.fixture
def interruptible():
    """A shell's background job, as this suite may be, ignores SIGINT, and so does all that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_host_that_joins_later_is_followed_too(mesh, other, capsys, monkeypatch):
    other.directory.log("worker-0.b").write_text(entry("worker-0.b", 1, "e1"))
    other.hosts = []
    looks, sleep, is_over = itertools.count(), asyncio.sleep, False

    async def next_look(seconds):
        nonlocal is_over
        await sleep(0)
        if seconds > 1.0 and next(looks) == 1:
            other.hosts = ["b"]
        # At least: two may be asked for between two looks.
        if not is_over and sum(isinstance(one, ReadLogs) for one in other.asked) >= 3:
            # As Ctrl-C: once, since a second one does not wait for tasks to end.
            is_over = True
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command.asyncio, "sleep", next_look)
    assert logs("m", Wanted(), follow=True, output="json") is ExitCode.OK
    assert events(capsys.readouterr().out.splitlines()).count("e1") == 1


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("away", ["not up yet", "restarted"])
def test_hosts_of_a_mesh_that_comes_later_or_anew_are_followed_too(mesh, other, capsys, monkeypatch, away):
    log = other.directory.log("worker-0.b")
    log.write_text(entry("worker-0.b", 1, "e1"))
    rounds, is_over, sleep = itertools.count(), False, asyncio.sleep
    found = []

    def find(name):
        found.append(name)
        if away == "not up yet" and len(found) < 3:
            raise NotRunning("no", why="no", do="up")

    async def ask(question, kind, *_):
        # The first supervisor has ended meanwhile: only a connection made since reaches the next one.
        if away == "restarted" and len(found) < 2 and len(other.asked) > 3:
            raise NotRunning("no", why="no", do="up")
        return await other.ask(question, kind)

    @contextlib.asynccontextmanager
    async def connected(_mesh):
        yield ask

    async def next_round(seconds):
        nonlocal is_over
        await sleep(0)
        number = next(rounds)
        if number == 30:
            with log.open("a") as file:
                file.write(entry("worker-0.b", 2, "e2"))
        if number > 100 and not is_over:
            is_over = True
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command, "find_mesh", find)
    monkeypatch.setattr(command, "connected", connected)
    monkeypatch.setattr(command.asyncio, "sleep", next_round)
    assert logs("m", Wanted(), follow=True, output="json") is ExitCode.OK
    shown = events(capsys.readouterr().out.splitlines())
    assert (shown.count("e1"), shown.count("e2")) == (1, 1)


def test_actors_that_a_host_has_only_later_are_shown(mesh, capsys, monkeypatch):
    monkeypatch.setattr(command, "_LOOK_S", 0.0)
    rounds, sleep = itertools.count(), asyncio.sleep

    async def next_round(seconds):
        await sleep(0 if seconds else 60.0)
        number = next(rounds)
        if number == 1:
            mesh.write_actors({"gateway-0": "gateway", "late-0": "late"})
            mesh.log("late-0").write_text(entry("late-0", 9, "it came later"))
        if number > 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(command.asyncio, "sleep", next_round)
    assert logs("m", Wanted(), follow=True, output="json") is ExitCode.OK
    assert events(capsys.readouterr().out.splitlines()).count("it came later") == 1


def test_a_mesh_that_has_ended_shows_what_is_here(mesh, capsys):
    mesh.run.write_host(HostRecord("a", "127.0.0.1", "127.0.0.1"))
    assert logs("m", Wanted(names=("gateway",)), follow=False, output="json") is ExitCode.OK
    told = capsys.readouterr()
    assert events(told.out.splitlines()) == ["joined", "slow"]
    assert told.err == "showing only this host's logs: no mesh named 'm' is running\n"


def test_files_that_somebody_moved_are_shown(mesh, capsys):
    for path in [*mesh.logs.glob("*.log")]:
        path.rename(path.with_name(path.name + ".1"))
    assert logs("m", Wanted(names=("gateway",)), follow=False, output="json") is ExitCode.OK
    assert events(capsys.readouterr().out.splitlines()) == ["joined", "slow"]


def test_who_has_no_log(mesh, capsys):
    with pytest.raises(WrongUsage, match=r"(?s)no actor or role gatway.*did you mean gateway"):
        logs("m", Wanted(names=("gatway",)), follow=False, output=None)
    with pytest.raises(WrongUsage, match="there is no log of worker-7"):
        logs("m", Wanted(names=("worker-7",)), follow=False, output=None)
    with pytest.raises(NotRunning, match=r"(?s)no logs of a mesh 'other'.*meshctl up"):
        logs("other", Wanted(), follow=False, output=None)


def test_times():
    now = datetime(2026, 3, 1, 12)
    ages = {"30s": 30, "10m": 600, "1.5h": 5400, "2d": 172_800}
    assert {text: now.timestamp() - parse_since(text, now) for text in ages} == ages
    assert parse_since("2026-03-01T11:00", now) == now.timestamp() - 3600
    assert parse_since("2026-03-01T11:00Z", now) == datetime.fromisoformat("2026-03-01T11:00+00:00").timestamp()
    with pytest.raises(WrongUsage, match="--since yesterday"):
        parse_since("yesterday", now)

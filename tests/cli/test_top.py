"""`meshctl top`: its screen from what supervisors say, and how it looks again."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from cli.commands import top as command
from cli.errors import NotRunning
from cli.exit_codes import ExitCode
from cli.protocol import ActorList, ListActors
from cli.supervisor.actor import SupervisorActor
from cli.supervisor.processes.by_pid import proportional_bytes
from cli.top_screen import Memory, Section, calls_section, head_lines, screen, sections
from mesh.address import Address
from nodes.actor_figures import ActorFigures
from nodes.protocol.records import AttemptRecord, CallRecord, CallsFound, FindCalls, SampleRecord
from tests.cli.statuses import actor

BUSY = ActorFigures(
    group="d", phase="decode", cpu_cores=0.5, memory_bytes=3 << 30, num_running=4, num_waiting=2, kv_usage=0.25,
    tokens_per_s=1234.5, output_tokens_per_s=200.0, hit_ratio=0.75, step_s=0.0125,
)  # fmt: skip
MESH = ActorList("m", "http://u", "echo", True, [
    actor("registry", state="ready", figures=ActorFigures(cpu_cores=0.01)),
    actor("gateway-0", figures=ActorFigures(cpu_cores=0.25, memory_bytes=1 << 30, num_running=5, num_waiting=1)),
    actor("worker-d", num_starts=3, num_restarts=2, last_reason="signal 9 (SIGKILL)", last_reason_age_s=1.0,
          state="starting", pss_bytes=1 << 30, next_start_in_s=None),
    actor("scheduler-d", figures=BUSY, uptime_s=61.0, pss_bytes=2 << 30),
    actor("tokenizer-0", last_reason="exit code 1", last_reason_age_s=2.0, num_restarts=1, next_start_in_s=4.0),
])  # fmt: skip


def test_who_is_busy_and_what_happened() -> None:
    lines = screen(head_lines(MESH, "12:00:00"), sections(MESH, None))
    assert lines[0] == "m: echo at http://u, not serving: no worker is ready  12:00:00"
    # Memory: PSS where that is known.
    assert lines[1] == ("requests 5 running, 1 waiting; 1,234.5 tokens/s, 200.0 drawn; CPU 0.76 cores; memory 4.0 GiB")
    names = lines[3].split()
    assert names == [
        "ACTOR", "STATE", "UPTIME", "CPU", "PSS", "RSS", "RUNNING", "WAITING", "KV", "HITS", "STEP",
        "TOKENS/S", "DRAWN/S", "STARTS",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[4:9]] == [
        "scheduler-d", "worker-d", "gateway-0", "tokenizer-0", "registry"
    ]  # fmt: skip
    assert lines[4].split() == [
        "scheduler-d", "ready", "1", "m", "1", "s", "50%", "2.0", "GiB", "3.0", "GiB", "4", "2", "25%", "75%",
        "12.5", "ms", "1,234.5", "200.0", "0",
    ]  # fmt: skip
    assert lines[5].split()[1:3] == ["STARTING", "-"]
    assert lines[9:] == [
        "", "RESTARTS",
        "worker-d  2 restarts: signal 9 (SIGKILL), 1 s ago",
        "tokenizer-0  1 restart: exit code 1, 2 s ago; next start in 4 s",
    ]  # fmt: skip


def test_hosts_are_shown_where_there_are_several_and_nothing_where_nothing_happened() -> None:
    mesh = msgspec.structs.replace(MESH, actors=[actor("worker-d", host="a")], notes=["host b is not in the mesh"])
    (only,) = sections(mesh, None)
    assert only.lines[0].split()[:3] == ["ACTOR", "HOST", "STATE"]
    assert head_lines(mesh, "t")[2:] == ["host b is not in the mesh"]


def test_a_small_terminal_shows_what_fits_and_how_much_does_not() -> None:
    many = [actor(f"worker-{number}", last_reason="x", last_reason_age_s=number) for number in range(30)]
    mesh = msgspec.structs.replace(MESH, actors=many)
    lines = screen(head_lines(mesh, "t"), sections(mesh, 60), 60, 20)
    assert len(lines) == 20
    assert max(map(len, lines)) <= 60
    assert "RSS" not in lines[3]
    assert [line for line in lines if line.startswith("... ")] == [
        "... 25 more; a higher terminal, a pipe or -o json shows them"[:60],
        "... 23 more; a higher terminal, a pipe or -o json shows them"[:60],
    ]
    assert len(screen(head_lines(mesh, "t"), sections(mesh, 60), 60, 4)) == 4
    assert screen(["head"], [Section("", ["a", "b"])], 10, 50) == ["head", "", "a", "b"]


def test_names_from_elsewhere_do_not_steer_the_terminal() -> None:
    wild = actor("x\x1b[2J", role="custom\x1b", host="h\n", last_reason="\x1b]0;title\x07", last_reason_age_s=1.0)
    mesh = msgspec.structs.replace(MESH, actors=[wild], notes=["\x1b[31m"])
    assert all(line.isprintable() for line in screen(head_lines(mesh, "t"), sections(mesh, None)))


def test_memory_is_of_an_incarnation_and_kept_until_it_is_said_again() -> None:
    memory = Memory()
    memory.take([actor("a", epoch=3, pss_bytes=7), actor("b")])
    mesh = msgspec.structs.replace(MESH, actors=[actor("a", epoch=3), actor("a", epoch=4), actor("b")])
    assert [one.pss_bytes for one in memory.filled(mesh).actors] == [7, None, None]


class Supervisor:
    """Answers in turn; an error instead is raised, as if it did not answer."""

    def __init__(self, *answers: ActorList | NotRunning) -> None:
        self.answers = list(answers)
        self.asked: list[ListActors] = []
        self.calls = CallsFound(calls=[])

    async def ask(
        self, question: ListActors | FindCalls, kind: type[ActorList | CallsFound], timeout_s: float = 3.0
    ) -> ActorList | CallsFound:
        if isinstance(question, FindCalls):
            return self.calls
        self.asked.append(question)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, NotRunning):
            raise answer
        return answer

    @contextlib.asynccontextmanager
    async def connected(self, mesh: Any) -> AsyncIterator[Any]:
        yield self.ask


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Look at a supervisor, `num_looks` times, then press Ctrl-C. Each second takes none."""

    def run(supervisor: Supervisor, output: str = "table", interval_s: float | None = None, num_looks: int = 3) -> str:
        now = [100.0]

        async def sleep(seconds: float) -> None:
            now[0] += seconds
            if now[0] - 100.0 >= num_looks * (interval_s or 1.0) - 0.001:
                raise KeyboardInterrupt

        monkeypatch.setattr(command, "find_mesh", lambda name: Mock())
        monkeypatch.setattr(command, "connected", supervisor.connected)
        monkeypatch.setattr(command, "time", Mock(monotonic=lambda: now[0], time=lambda: 7.0, strftime=lambda _: "t"))
        monkeypatch.setattr(command, "asyncio", Mock(run=asyncio.run, sleep=sleep))
        assert command.top("m", output, interval_s) is ExitCode.OK
        return capsys.readouterr().out

    return run


def test_piped_it_looks_once_unless_it_is_told_an_interval(look: Callable[..., str]) -> None:
    supervisor = Supervisor(MESH)
    assert look(supervisor).splitlines()[0].startswith("m: echo at http://u")
    assert [(one.figures, one.whole_mesh, one.pss) for one in supervisor.asked] == [(True, True, True)]
    assert look(Supervisor(MESH), interval_s=2.0).count("m: echo at http://u") == 3


def test_json_is_one_document_or_a_line_for_each_look(look: Callable[..., str]) -> None:
    document = json.loads(look(Supervisor(MESH), "json"))
    assert (document["mesh"], document["at"], len(document["actors"])) == ("m", 7.0, 5)
    scheduler = document["actors"][3]
    assert (scheduler["pss_bytes"], scheduler["hit_ratio"], scheduler["actor_id"]) == (2 << 30, 0.75, "scheduler-d")
    lines = look(Supervisor(MESH), "json", interval_s=1.0).splitlines()
    assert [json.loads(line)["mesh"] for line in lines] == ["m"] * 3


def test_what_is_dear_is_asked_for_every_five_seconds_and_shown_until_then(look: Callable[..., str]) -> None:
    without = msgspec.structs.replace(MESH, actors=[msgspec.structs.replace(a, pss_bytes=None) for a in MESH.actors])
    supervisor = Supervisor(MESH, without)
    lines = look(supervisor, "json", interval_s=1.0, num_looks=7).splitlines()
    assert [one.pss for one in supervisor.asked] == [True, False, False, False, False, True, False]
    assert [json.loads(line)["actors"][3]["pss_bytes"] for line in lines] == [2 << 30] * 5 + [None] * 2


def test_a_supervisor_that_is_silent_for_a_moment(look: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    silent = NotRunning("it does not answer", why="busy", do="wait")
    monkeypatch.setattr(command, "is_alive", lambda *_: True)
    out = look(Supervisor(MESH, silent, silent, MESH), interval_s=1.0, num_looks=4)
    assert out.count("the supervisor does not answer; this is what it said last") == 2
    assert out.count("scheduler-d") == 4
    with pytest.raises(NotRunning):
        look(Supervisor(silent))
    monkeypatch.setattr(command, "is_alive", lambda *_: False)
    with pytest.raises(NotRunning):
        look(Supervisor(MESH, silent), interval_s=1.0)


def test_a_terminal_comes_back_as_it_was(look: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(command.shutil, "get_terminal_size", lambda: os.terminal_size((80, 12)))
    out = look(Supervisor(MESH), num_looks=2)
    assert out.startswith("\x1b[?1049h")
    assert out.endswith("\x1b[?1049l")
    frames = out.split("\x1b[H")[1:]
    assert len(frames) == 2
    assert all(frame.count("\r\n") == 11 for frame in frames)


def test_a_supervisor_tells_the_memory_of_its_own_processes_if_it_is_asked() -> None:
    own = ActorList("m", "u", "echo", True, [actor("worker-d", pid=os.getpid()), actor("worker-e", pid=0)])
    supervisor = SupervisorActor(Mock(list_actors=lambda: own), os.getpid())
    me = Mock(actor_id="supervisor", role="supervisor", host="", attributes={})
    supervisor.ctx = Mock(now=lambda: 1.0, describe=lambda: me, address=Address("supervisor", 1))
    supervisor.ctx.members.all = list
    told = asyncio.run(supervisor._list(ListActors(pss=True))).actors
    assert {one.actor_id: bool(one.pss_bytes) for one in told} == {
        "supervisor": True, "worker-d": True, "worker-e": False
    }  # fmt: skip
    assert not any(one.pss_bytes for one in asyncio.run(supervisor._list(ListActors())).actors)


def test_memory_that_is_shared_is_divided() -> None:
    found = proportional_bytes(os.getpid())
    assert found is not None
    assert found > 1 << 20
    assert found % 1024 == 0
    assert proportional_bytes(0) is None


def test_calls_that_run_say_what_they_wait_for_the_oldest_first() -> None:
    waiting = SampleRecord(
        request_id="c-0", attempts=[AttemptRecord(attempt=0, scheduler="d", submitted_s=0.1, accepted_s=0.2)]
    )
    calls = [
        CallRecord(request_id="young", total_s=1.0),
        CallRecord(
            request_id="old\x1b[0m", total_s=75.0, read_s=0.0, prepared_s=0.1, prompt_tokens=7, num_samples=1,
            attempts=1, key="alice", samples=[waiting],
        ),
    ]  # fmt: skip
    clients, section = calls_section(CallsFound(calls=calls, num=5), None)
    assert [line.split() for line in clients.lines[1:]] == [
        ["alice", "1", "1", "1", "m", "15", "s", "0"],
        ["-", "1", "1", "1", "s", "0"],
    ]
    head, old, young, more = section.lines
    assert head.split() == ["REQUEST", "AGE", "PHASE", "AT", "TOKENS", "SAMPLES", "TRIES", "KEY"]
    assert old.split()[1:] == ["1", "m", "15", "s", "waiting", "d", "7+0", "1", "1", "alice"]
    assert "\x1b" not in old
    assert young.split()[:4] == ["young", "1", "s", "body"]
    assert more == "... 3 more"
    assert calls_section(CallsFound(calls=[]), None) == []
    many = [msgspec.structs.replace(calls[0], request_id=f"c{number}") for number in range(100)]
    (section,) = calls_section(CallsFound(calls=many, num=120), None)
    assert (section.heading, len(section.lines), section.lines[-1]) == ("REQUESTS", 22, "... 100 more")

"""What `meshctl ps` says beside its table."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from cli.commands import ps as command
from cli.errors import NotRunning
from cli.exit_codes import ExitCode
from cli.protocol import ActorList, ActorStatus, ListActors
from cli.supervisor.actor import SupervisorActor
from mesh.address import Address, Endpoint
from mesh.membership.view import Member
from nodes.actor_figures import ActorFigures
from nodes.context_length import ServedContext
from tests.cli.statuses import actor

CONTEXT = ServedContext(length=2048, model_length=2048, kv_tokens=4096)
NOTE = "pages of kv-agent-1 come by tcp instead of nccl: no NCCL (device_unavailable)"


class Meshes:
    """Supervisors by the name of their mesh; an error answers for who does not."""

    def __init__(self, **meshes: list[ActorStatus] | NotRunning) -> None:
        self.meshes = meshes
        self.num_asked = 0
        self.context: ServedContext | None = None
        self.notes: list[str] = []

    def find(self, name: str) -> Mock:
        return Mock(ask=lambda *_: self.answer(name))

    def answer(self, name: str) -> ActorList:
        self.num_asked += 1
        found = self.meshes[name]
        if isinstance(found, NotRunning):
            raise found
        mesh = ActorList(mesh=name, url=f"http://{name}", model="echo", ready=True, actors=found, context=self.context)
        return msgspec.structs.replace(mesh, notes=self.notes)


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    def run(meshes: Meshes, name: str | None = None, output: str = "table", code: ExitCode = ExitCode.OK) -> list[str]:
        monkeypatch.setattr(command, "find_mesh", meshes.find)
        monkeypatch.setattr(command, "running_meshes", lambda: list(meshes.meshes))
        assert command.ps(name, output) is code
        return capsys.readouterr().out.splitlines()

    return run


def test_notes_are_printed(show: Callable[..., list[str]]) -> None:
    meshes = Meshes(m=[actor("kv-agent-0", notes=[NOTE]), actor("kv-agent-1")])
    assert show(meshes, "m")[4:] == [f"kv-agent-0: {NOTE}"]
    assert [entry["notes"] for entry in json.loads("".join(show(meshes, "m", "json")))] == [[NOTE], []]


def test_the_url_is_there_and_all_meshes_are_where_none_is_named(show: Callable[..., list[str]]) -> None:
    meshes = Meshes(a=[actor("kv-agent-0")], b=[actor("kv-agent-1")])
    lines = show(meshes)
    assert lines[0] == "a: echo at http://a, ready"
    assert lines[4] == "b: echo at http://b, ready"
    assert "kv-agent-0" in lines[2]
    assert "kv-agent-1" in lines[6]
    assert show(meshes, "b") == lines[4:]
    entries = json.loads("".join(show(meshes, None, "json")))
    assert [(entry["mesh"], entry["url"], entry["actor_id"]) for entry in entries] == [
        ("a", "http://a", "kv-agent-0"), ("b", "http://b", "kv-agent-1")
    ]  # fmt: skip


def test_on_a_host_without_a_gateway_the_url_is_another_host_s(show: Callable[..., list[str]]) -> None:
    head, p = (actor(f"supervisor.{host}", role="supervisor", host=host) for host in ("head", "p"))
    gateway = actor("gateway-0.head", host="head")
    at = [show(Meshes(m=actors), "m")[0].partition(",")[0] for actors in ([p, head, gateway], [head, gateway, p])]
    assert at == ["m: echo at http://m on host head", "m: echo at http://m"]


def test_a_mesh_that_serves_nothing_is_not_called_ready(show: Callable[..., list[str]]) -> None:
    others = [actor("gateway-0"), actor("worker-m")]
    gone = Meshes(m=[*others, actor("tokenizer-0", state="drained")])
    assert show(gone, "m")[0] == "m: echo at http://m, not serving: no tokenizer is ready"
    released = Meshes(m=[actor("worker-a", state="released"), actor("gateway-0")])
    assert "no worker is ready" in show(released, "m")[0]
    one_of_two = [actor("tokenizer-1"), actor("tokenizer-0", state="drained")]
    assert show(Meshes(m=[*others, *one_of_two]), "m")[0] == "m: echo at http://m, ready"


def test_what_a_host_that_is_away_has_taken_along_is_missed(show: Callable[..., list[str]]) -> None:
    roles = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")
    head = [actor(f"{role}-0.head", host="head") for role in roles]
    assert show(Meshes(m=head), "m")[0] == "m: echo at http://m, ready"
    left = [one for one in head if one.role not in ("scheduler", "worker")]
    assert show(Meshes(m=left), "m")[0] == "m: echo at http://m, not serving: none is ready of scheduler, worker"
    unheard = [*left[1:], *head[2:4], msgspec.structs.replace(left[0], state="unknown")]
    told = "whether it serves is not known here: no gateway is heard from"
    assert show(Meshes(m=unheard), "m")[0] == f"m: echo at http://m, {told}"


def test_unequal_numerics_of_the_mesh_s_groups_are_told(show: Callable[..., list[str]]) -> None:
    schedulers = [
        Member(f"s-{group}", "scheduler", 1, Endpoint("c", "d"), attributes={"group": group, "numerics": numerics})
        for group, numerics in (("a", "x"), ("b", "y"))
    ]
    supervisor = SupervisorActor(Mock(list_actors=lambda: ActorList("m", "u", "echo", True, [])), 1)
    supervisor.ctx = Mock(now=lambda: 1.0, describe=lambda: schedulers[0], address=Address("supervisor", 1))
    supervisor.ctx.members.all = lambda: schedulers
    meshes = Meshes(m=[])
    meshes.notes = asyncio.run(supervisor._list(ListActors())).notes
    told = "worker groups compute with different numerics, so their results are not bit-identical: a (x); b (y)"
    assert show(meshes, "m")[1] == told
    meshes.meshes["m"] = [actor("worker-a")]
    assert json.loads("\n".join(show(meshes, "m", "json")))[0]["mesh_notes"] == [told]


def test_the_served_context_is_told(show: Callable[..., list[str]]) -> None:
    meshes = Meshes(m=[])
    meshes.context = CONTEXT
    assert show(meshes, "m")[1] == "KV: 4,096 tokens; context 2,048"


def test_a_mesh_that_does_not_answer_is_told_of_and_the_others_are_shown(show: Callable[..., list[str]]) -> None:
    silent = NotRunning("it does not answer", why="it hangs", do="end it")
    assert "b: echo at http://b, ready" in show(Meshes(a=silent, b=[]), code=ExitCode.NOT_RUNNING)
    with pytest.raises(NotRunning, match="does not answer"):
        show(Meshes(a=silent))


def test_no_mesh_at_all(show: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(NotRunning, match=r"(?s)no mesh.*meshctl up"):
        show(Meshes())


def test_what_happened_to_an_actor_and_when_it_comes_again(show: Callable[..., list[str]]) -> None:
    waits = actor("a", last_reason="killed by SIGKILL", last_reason_age_s=65.2, next_start_in_s=9.6)
    back = actor("b", last_reason="exit code 1", last_reason_age_s=2.0)
    away = actor("d", state="drained", last_reason="drained, as requested", last_reason_age_s=3.0)
    assert show(Meshes(m=[waits, back, actor("c"), away]), "m")[6:] == [
        "a: killed by SIGKILL, 1 m 5 s ago; next start in 9 s",
        "b: exit code 1, 2 s ago",
        "d: drained, as requested, 3 s ago; `meshctl restart d` brings it back",
    ]


def test_figures_are_in_the_table_and_all_of_them_in_json(show: Callable[..., list[str]]) -> None:
    figures = ActorFigures(group="decode-0", phase="decode", cpu_cores=0.5, num_running=3, output_tokens_per_s=7.5)
    meshes = Meshes(m=[actor("s", role="scheduler", figures=figures)])
    _, names, row = show(meshes, "m")
    assert names.split()[7:] == ["GROUP", "PHASE", "CPU", "MEMORY", "RUNNING", "WAITING", "KV", "TOKENS/S"]
    assert row.split()[7:] == ["decode-0", "decode", "50%", "-", "3", "-", "-", "-"]
    (entry,) = json.loads("".join(show(meshes, "m", "json")))
    assert entry.items() >= msgspec.structs.asdict(figures).items()


def test_an_agent_s_pages_by_what_they_came(show: Callable[..., list[str]]) -> None:
    agent = actor("kv-agent-0", figures=ActorFigures(pulled_bytes={"tcp": 3 << 20, "shm": 1 << 10}))
    assert show(Meshes(m=[agent, actor("a")]), "m")[4:] == [
        "kv-agent-0: pulled 1.0 KiB by shm, 3.0 MiB by tcp (not encrypted)"
    ]


def test_what_is_wrong_stands_below_the_table_with_what_to_do(show: Callable[..., list[str]]) -> None:
    agent = actor("kv-agent-0.d", host="d", figures=ActorFigures(unreached={"kv-agent-0.p": 12.0, "worker-0.d": 75.0}))
    full = actor("s", role="scheduler", figures=ActorFigures(lacks_pages=True))
    assert show(Meshes(m=[agent, full]), "m")[4:] == [
        "kv-agent-0.d: cannot reach kv-agent-0.p for 12 s; see to the network between hosts d and p",
        "kv-agent-0.d: cannot reach worker-0.d for 1 m 15 s",
        "s: requests wait for KV pages: raise --kv-memory or --kv-pages, or let clients ask for less",
    ]


def test_who_is_not_supervised_is_shown_as_such(show: Callable[..., list[str]]) -> None:
    meshes = Meshes(m=[actor("a"), actor("words-0", role="custom", supervised=False)])
    lines = [line.split() for line in show(meshes, "m")]
    assert [line[-1] for line in lines[1:]] == ["SUPERVISED", "yes", "no"]


def test_a_narrow_terminal_goes_without_some_columns(
    show: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    _, names, _, left_out = show(Meshes(m=[actor("scheduler-decode-0")]), "m")
    assert len(names) <= 100
    assert left_out == "(too narrow for EPOCH, PID, ROLE; -o json shows all)"


def test_who_has_no_process_has_no_pid_in_json_either(show: Callable[..., list[str]]) -> None:
    """`kill -9 0` ends the script that reads it."""
    entries = json.loads("".join(show(Meshes(m=[actor("a"), actor("b", pid=0, state="given_up")]), "m", "json")))
    assert [entry["pid"] for entry in entries] == [7, None]


def test_watching_shows_it_again_until_ctrl_c(
    show: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    meshes = Meshes(m=[actor("a")])
    show(meshes, "m")
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", sleep)
    assert command.ps("m", "table", watch=True) is ExitCode.OK
    assert (slept, meshes.num_asked) == ([2.0] * 3, 4)
    assert capsys.readouterr().out.count("m: echo at http://m, ready") == 3

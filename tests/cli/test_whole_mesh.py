"""What one supervisor asks the others of a mesh of several hosts: lists, restarts and the end, in their order."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cli.plan.names import supervisor_id
from cli.protocol import ActorList, ActorStatus, ListActors, RestartActors, Restarting, StopMesh, Stopping
from cli.supervisor.hosts import whole_restart, whole_stop
from cli.supervisor.hosts.whole_mesh import UNKNOWN, clock_notes, joined, list_whole_mesh
from cli.supervisor.hosts.whole_restart import WholeRestart
from cli.supervisor.hosts.whole_stop import stop_whole_mesh
from cli.supervisor.told.refusals import Refused
from mesh.address import Address, Endpoint, host_of
from mesh.errors import PeerLost
from mesh.membership.view import READY, SUPERVISOR, Member
from mesh.supervision.events import DRAINED, GIVEN_UP
from tests.cli import statuses
from tests.mesh.recorded_call import RecordedCall

NOWHERE = Endpoint("", "")
ROLES = {"a": ["gateway", "tokenizer"], "b": ["scheduler", "worker"], "c": ["scheduler", "worker"]}


def actor(name: str, host: str, **fields: Any) -> ActorStatus:
    return statuses.actor(f"{name}.{host}", host=host, **fields)


class Hosts:
    """Supervisors of three hosts behind one context, `supervisor.a`'s; who is in `silent` does not answer."""

    def __init__(self, silent: tuple[str, ...] = ()) -> None:
        self.silent = silent
        self.absent = ""
        self.said: list[tuple[str, Any]] = []
        self.asked: list[ListActors] = []
        self.actors = {host: {role: actor(f"{role}-0", host) for role in some} for host, some in ROLES.items()}
        self.address = Address(supervisor_id("a"), 1)
        self.log = SimpleNamespace(warning=lambda *_, **__: None, debug=lambda *_, **__: None)
        supervisors = [Member(supervisor_id(host), SUPERVISOR, 1, NOWHERE, host=host) for host in ROLES]
        self.members = SimpleNamespace(by_role=lambda role, ready: supervisors if role == SUPERVISOR else [])
        self.epoch_of: Callable[[int], int] = lambda epoch: epoch + 1
        self.state = READY

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def listed(self, host: str) -> ActorList:
        return ActorList("m", "u", "tiny", True, list(self.actors[host].values()), notes=[f"{host} is there", "slow"])

    async def ask(self, supervisor: str, question: Any, *, timeout_s: float) -> Any:
        host = host_of(supervisor)
        await asyncio.sleep(0)
        if host in self.silent:
            raise PeerLost(f"{supervisor} does not answer")
        match question:
            case ListActors():
                self.asked.append(question)
                answer: Any = self.listed(host)
            case RestartActors(names=names, stay_away=stay_away):
                self.said.append((host, ("drain" if stay_away else "restart", *names)))
                for role, one in self.actors[host].items():
                    if one.actor_id in names:
                        epoch, state = (one.epoch, DRAINED) if stay_away else (self.epoch_of(one.epoch), self.state)
                        self.actors[host][role] = msgspec.structs.replace(one, epoch=epoch, state=state)
                answer = Restarting(epochs=dict.fromkeys(names, 1))
            case _:
                self.said.append((host, question))
                answer = Stopping(pid=1)
        return SimpleNamespace(message=answer)

    async def look(self) -> list[ActorStatus]:
        return [one for host in self.actors for one in self.listed(host).actors]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (whole_restart, whole_stop):
        monkeypatch.setattr(module, "_LOOK_S", 0.0)


@pytest.fixture
def hosts() -> Hosts:
    return Hosts()


def test_the_list_of_the_whole_mesh_is_every_host_s_own(hosts: Hosts) -> None:
    own = msgspec.structs.replace(
        hosts.listed("a"), actors=[*hosts.listed("a").actors, actor("worker-0", "c", supervised=False)]
    )
    question = ListActors(figures=True, whole_mesh=True, pss=True)
    whole = asyncio.run(list_whole_mesh(hosts, own, ROLES, question))  # type: ignore[arg-type]
    assert hosts.asked == [ListActors(figures=True, pss=True)] * 2, "each for its own host only"
    assert [one.actor_id for one in whole.actors] == [
        "gateway-0.a", "tokenizer-0.a", "scheduler-0.b", "worker-0.b", "scheduler-0.c", "worker-0.c"
    ]  # fmt: skip
    assert all(one.supervised for one in whole.actors), "who is another's to supervise is no stranger"
    assert whole.ready
    assert whole.notes == ["a is there", "slow", "b is there", "c is there"]


def test_clocks_are_compared_only_beyond_the_time_that_asking_took() -> None:
    told = {"same": 101.0, "slow": 98.5, "ahead": 192.0, "behind": 10.0, "old release": 0.0}
    assert [note.partition(":")[0] for note in clock_notes(told, 99.0, 102.0)] == [
        "the clock of host ahead is 90 s ahead of this one's",
        "the clock of host behind is 89 s behind this one's",
    ]


def test_a_host_that_does_not_answer_is_named_and_what_is_known_of_it_stays() -> None:
    hosts = Hosts(silent=("c",))
    stranger = actor("worker-0", "c", supervised=False)
    own = msgspec.structs.replace(hosts.listed("a"), actors=[*hosts.listed("a").actors, stranger])
    whole = asyncio.run(list_whole_mesh(hosts, own, [*ROLES, "d"], ListActors()))  # type: ignore[arg-type]
    assert whole.notes[:2] == ["host c does not answer within 2 s", "host d is not in the mesh"]
    assert whole.silent == ["c", "d"]
    assert not whole.ready
    assert whole.actors[-1] == msgspec.structs.replace(stranger, state=UNKNOWN)


def test_one_host_that_is_not_ready_makes_the_mesh_not_ready() -> None:
    own = Hosts().listed("a")
    assert not joined([own, msgspec.structs.replace(own, ready=False)], {}).ready


async def stop(hosts: Hosts, registry_host: str, **fields: Any) -> list[tuple[str, Any]]:
    gone: list[str] = []

    def is_there(supervisor: str) -> bool:
        gone.append(supervisor)
        return False

    await stop_whole_mesh(hosts, StopMesh(reason="r", **fields), registry_host, 1.0, is_there)  # type: ignore[arg-type]
    assert gone == [supervisor_id(host) for host, what in hosts.said if isinstance(what, StopMesh)]
    return hosts.said


def test_the_end_goes_tier_by_tier_and_the_registry_s_host_is_last() -> None:
    end = StopMesh(reason="r")
    assert asyncio.run(stop(Hosts(), "b")) == [
        ("a", ("drain", "gateway-0.a")),
        ("a", ("drain", "tokenizer-0.a")), ("b", ("drain", "scheduler-0.b")), ("c", ("drain", "scheduler-0.c")),
        ("c", end), ("b", end),
    ]  # fmt: skip


def test_a_forced_end_drains_nobody_and_a_silent_host_keeps_nobody() -> None:
    end = StopMesh(reason="r", force=True)
    assert asyncio.run(stop(Hosts(silent=("c",)), "a", force=True)) == [("b", end)]


async def answered(rolling: WholeRestart, call: RecordedCall, request: RestartActors) -> None:
    try:
        await rolling.run(call, request)  # type: ignore[arg-type]
    except Refused as error:
        call.fail(error.code, error.message, retryable=error.retryable)


def restarting(hosts: Hosts, *names: str, stay_away: bool = False) -> tuple[RecordedCall, WholeRestart]:
    call, rolling = RecordedCall(), WholeRestart(hosts, hosts.look, lambda: hosts.absent)  # type: ignore[arg-type]
    request = RestartActors(names=list(names), stay_away=stay_away)
    asyncio.run(answered(rolling, call, request))
    assert not rolling.is_running
    return call, rolling


def test_a_role_is_restarted_host_after_host(hosts: Hosts) -> None:
    call, _ = restarting(hosts, "scheduler", "gateway-0.a")
    assert call.answers == [Restarting(epochs={"scheduler-0.b": 1, "scheduler-0.c": 1, "gateway-0.a": 1})]
    assert hosts.said == [
        ("b", ("restart", "scheduler-0.b")), ("c", ("restart", "scheduler-0.c")), ("a", ("restart", "gateway-0.a"))
    ]  # fmt: skip


def test_hosts_after_an_actor_that_does_not_come_again_are_left_alone(hosts: Hosts) -> None:
    hosts.state = GIVEN_UP
    restarting(hosts, "worker")
    assert [host for host, _ in hosts.said] == ["b"]


def test_hosts_after_one_that_does_not_answer_are_left_alone() -> None:
    hosts = Hosts(silent=("b",))
    restarting(hosts, "worker", stay_away=True)
    assert hosts.said == []


def test_an_unknown_name_is_refused_and_nothing_happens(hosts: Hosts) -> None:
    call, _ = restarting(hosts, "gateway", "schedular")
    assert call.answers == [("unknown_actor", False, None)]
    assert hosts.said == []


@pytest.mark.parametrize("name", ["supervisor", "supervisor.b"])
def test_a_supervisor_is_not_restarted(hosts: Hosts, name: str) -> None:
    call, _ = restarting(hosts, "gateway", name)
    assert call.answers == [("not_restartable", False, None)]
    assert call.why == "the supervisor cannot be drained or restarted by itself"
    assert hosts.said == []


def test_hosts_that_are_not_in_the_mesh_are_named(hosts: Hosts) -> None:
    hosts.absent = "host p is not in the mesh"
    call, _ = restarting(hosts, "gateway")
    assert call.answers == [Restarting(epochs={"gateway-0.a": 1}, note="host p is not in the mesh")]
    call, _ = restarting(hosts, "scheduler-0.p")
    assert "there is no actor or role scheduler-0.p; host p is not in the mesh; " in call.why


def test_one_restart_at_a_time_in_the_whole_mesh() -> None:
    async def two(hosts: Hosts) -> list[RecordedCall]:
        rolling = WholeRestart(hosts, hosts.look, lambda: hosts.absent)  # type: ignore[arg-type]
        calls = [RecordedCall(), RecordedCall()]
        await asyncio.gather(*(answered(rolling, one, RestartActors(names=["worker"])) for one in calls))
        return calls

    first, second = asyncio.run(two(Hosts()))
    assert isinstance(first.answers[0], Restarting)
    assert second.answers == [("restart_running", True, None)]

"""One seeded run in which all hosts of a mesh are told to end, in any order and at any time, while clients are served.

As a batch system does that signals every process of a job. Tokenizer and detokenizers are on any of the hosts. Each
host ends its actors as the core of its supervisor says. No request ends in silence: it is whole, or its client is told;
what a scheduler had when the first host was told is whole, if the time is enough for it. Every host ends in its time,
and who drained in time holds nothing.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import override

from cli.plan.role_configs import BUILT_IN
from cli.protocol import ActorList, ActorStatus
from cli.supervisor import actor as supervisor
from cli.supervisor.actor import SupervisorActor
from cli.supervisor.hosts.others import SHARED
from mesh.address import Address, Endpoint
from mesh.membership.view import READY
from mesh.simulation.faults import Faults
from mesh.supervision.core import Supervisor
from mesh.supervision.events import (
    AwaitOthers,
    Beat,
    Begin,
    Event,
    Exited,
    Kill,
    MeshStopped,
    OthersDone,
    Policy,
    Spawned,
    Stop,
    Supervised,
    Terminate,
    Tick,
)
from mesh.testing.processes import ProcessState
from nodes.gateway.errors import ApiError, error_from
from nodes.gateway.requests.log import Phase
from nodes.gateway.service import GatewayService
from nodes.scheduler.actor import SchedulerActor
from nodes.scheduler.core import SchedulerCore
from tests.simulation.hosted_mesh import DECODE, HEAD, PREFILL, HostedMesh
from tests.simulation.hosts import HEARTBEAT_S
from tests.simulation.planting import Bug, bug, nothing, returns
from tests.simulation.scenario import Client, ask_all, draw_clients, draw_faults, judge_tokens, play
from tests.simulation.whole_mesh import Outcome

AMPLE_S, SHORT_S = 30.0, (0.3, 2.0)
OVER_S = 10.0
"""What is to be given a host beyond its `drain_timeout_s`, by docs/operations.md."""
UNDER_WAY = ("_running", "_waiting", "_grants", "_orders", "_grants_open", "_calls_inflight")


class EndingHost:
    """Stands in for a keeper: ends the actors of a host, once told to, by the decisions of a supervisor's core."""

    def __init__(self, mesh: "EndingMesh", host: str) -> None:
        self._mesh, self._host = mesh, host
        self._core: Supervisor | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.is_over = asyncio.Event()
        self.took_s = 0.0

    def tell(self) -> None:
        """It is told to end now; all its actors have started."""
        mesh, ids = self._mesh, [one for one in self._mesh.ids_of(self._host) if not one.startswith("supervisor")]
        mesh.gone |= {*ids, f"supervisor.{self._host}"}
        specs = [_supervised(actor_id, mesh.actors[actor_id].role) for actor_id in ids]
        epochs = {actor_id: mesh.processes[actor_id].address.epoch - 1 for actor_id in ids}
        self._told_at = asyncio.get_running_loop().time()
        self._core = Supervisor(specs, Policy(drain_timeout_s=mesh.bound_s), epochs)
        for event in (Begin(), *(Spawned(*mesh.processes[one].address) for one in ids)):
            self._core.handle(event, self._told_at)
        for actor_id in ids:
            self._core.handle(Beat(*mesh.processes[actor_id].address, ready=True), self._told_at)
        self._feed(Stop("SIGTERM"))

    def beat(self, peer: Address, state: str, progress: str) -> None:
        """No actor is killed for silence."""

    def list_actors(self) -> ActorList:
        ids = [one for one in self._mesh.ids_of(self._host) if one in self._mesh.actors]
        watches = self._core.watches if self._core is not None else {}
        rows = [
            ActorStatus(
                one, self._mesh.actors[one].role, 1, 1, Endpoint("", ""), watches[one].state if watches else READY
            )
            for one in ids
            if not one.startswith("supervisor")
        ]
        return ActorList("sim", "", "echo", ready=True, actors=rows, ends=bool(watches))

    def others_done(self) -> None:
        self._feed(OthersDone())

    def _feed(self, event: Event) -> None:
        core, now = self._core, asyncio.get_running_loop().time()
        assert core is not None
        for actor_id in core.watches if isinstance(event, Tick) else ():
            core.handle(Beat(*self._mesh.processes[actor_id].address, ready=True), now)
        for command in core.handle(event, now):
            match command:
                case Terminate(actor_id, within_s):
                    # Not in the process, which is dead before this has ended.
                    self._spawn(self._end(actor_id, min(within_s, self._mesh.bound_s)))
                case Kill(actor_id):
                    self._mesh.counts["killed"] += 1
                    self._mesh.processes[actor_id].kill()
                    asyncio.get_running_loop().call_soon(
                        self._feed, Exited(*self._mesh.processes[actor_id].address, "killed")
                    )
                case AwaitOthers():
                    self._mesh.counts["awaits others"] += 1
                    name = f"supervisor.{self._host}"
                    self._mesh.processes[name].spawn(self._mesh.actors[name].await_others())
                case MeshStopped():
                    self._spawn(self._stop(f"supervisor.{self._host}"))
                case _:
                    continue
        if self._timer is not None:
            self._timer.cancel()
        if (deadline := core.deadline()) is not None:
            self._timer = self._mesh.outside(asyncio.get_running_loop().call_at, deadline, self._feed, Tick())

    def _spawn(self, todo: Coroutine[Any, Any, None]) -> None:
        self._mesh.keep(self._mesh.outside(asyncio.get_running_loop().create_task, todo))

    async def _end(self, actor_id: str, within_s: float) -> None:
        """What the process of an actor does when its supervisor has it drain (`mesh/run.py`)."""
        mesh = self._mesh
        system, process = mesh.systems[actor_id], mesh.processes[actor_id]
        is_drained = await process.spawn(_in_time(system.drain(), within_s))
        mesh.counts["drained" if is_drained else "cut off"] += 1
        if is_drained:
            mesh.found += [
                f"{actor_id} has drained and holds {name}={value:g}"
                for name, value in system.actor.stats().items()
                if value and name.endswith(UNDER_WAY)
            ]
        await self._stop(actor_id)
        self._feed(Exited(*process.address, "exit 0", cause="exit_0"))

    async def _stop(self, actor_id: str) -> None:
        process = self._mesh.processes[actor_id]
        await process.spawn(self._mesh.systems[actor_id].stop())
        process.kill()
        if actor_id.startswith("supervisor"):
            self.took_s = asyncio.get_running_loop().time() - self._told_at
            self.is_over.set()


def _supervised(actor_id: str, role: str) -> Supervised:
    return Supervised(actor_id, BUILT_IN[role].drain_tier, is_shared=role in SHARED)


async def _in_time(todo: Coroutine[Any, Any, None], within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await todo
    except TimeoutError:
        return False
    return True


@dataclass
class EndingMesh(HostedMesh):
    """Its hosts have `bound_s` to end. `found` is what is wrong with how they did."""

    bound_s: float = AMPLE_S
    found: list[str] = field(default_factory=list[str])
    under_way: set[str] = field(default_factory=set[str])
    can_finish: bool = False

    def __post_init__(self) -> None:
        draw = random.Random(f"ends/places/{self.seed}")
        # Most often together, at the registry and the gateway or away from them.
        homes = draw.choice([[HEAD], [draw.choice([PREFILL, DECODE])], [HEAD, PREFILL, DECODE]])
        self._homes = {f"{name}okenizer-{number}": draw.choice(homes) for name in ("t", "det") for number in range(2)}
        super().__post_init__()
        self.enders = {host: EndingHost(self, host) for host in self.hosts}
        for host, ender in self.enders.items():
            self.makers[f"supervisor.{host}"] = lambda ender=ender: SupervisorActor(ender, 1)  # type: ignore[arg-type]
        # A lost link may cost an attempt, and no other group takes the next one.
        self.can_finish = self.bound_s == AMPLE_S and self.network.faults == Faults()
        if self.can_finish:
            self.speeds = self.speeds._replace(
                num_pages=96, num_prefill_pages=96, step_ms=dict.fromkeys(self.groups, 5)
            )

    @override
    def edge_id(self, actor_id: str) -> str:
        return f"{actor_id}.{self._homes.get(actor_id, HEAD)}"

    def outside(self, do: Callable[..., Any], *arguments: Any) -> Any:
        """Call something that belongs to no simulated process."""
        return self._outside.run(do, *arguments)

    def keep(self, task: "asyncio.Task[None]") -> None:
        self._keep(task)

    def note_under_way(self) -> None:
        """What a scheduler has taken by now is what an ending mesh has to finish."""
        gateway = self.actors[self.gateway_id]
        self.under_way = {name for name, one in gateway.service.core.requests.items() if one.phase is Phase.RUNNING}

    @override
    async def _request(self, service: Any, job: Any, abandon_after_s: float | None, outcomes: list[Outcome]) -> None:
        """As on the HTTP side: what is refused is told, and a drain waits for what was taken in."""
        try:
            place = service.door.enter()
            try:
                await super()._request(service, job, abandon_after_s, outcomes)
            finally:
                service.door.leave(place)
        except ApiError as error:
            outcomes.append(Outcome(failure=error))

    @override
    async def request(self, body: bytes, request_id: str, **options: Any) -> list[Outcome]:
        outcomes = await super().request(body, request_id, **options)
        is_told = any(outcome.failure for outcome in outcomes)
        for index, outcome in enumerate(outcomes):
            name = f"{request_id}-{index}"
            if not (outcome.num_ends or is_told):
                self.found.append(f"{name} ended in silence: {outcome}")
            if self.can_finish and name in self.under_way and outcome.finish_reason is None:
                self.found.append(f"{name} was under way, and was not finished: {outcome}")
        return outcomes

    async def until_all_serve(self) -> None:
        """All actors have started."""
        await self._until_started([one for host in self.hosts for one in self.ids_of(host)])

    @override
    async def settle(self) -> None:
        """All hosts have ended, in their time."""
        alive = [name for name, process in self.processes.items() if process.state is not ProcessState.DEAD]
        self.found += [f"{name} is still there" for name in alive]
        for host, ender in self.enders.items():
            if ender.took_s > self.bound_s + OVER_S:
                self.found.append(f"host {host} took {ender.took_s:.1f} s to end, with {self.bound_s:g} s to drain")

    @override
    async def stop(self) -> None:
        """It has ended."""


def _problem(mesh: EndingMesh, client: Client, outcome: Outcome, _elapsed_s: float) -> str:
    text, reason, token_ids = client.expected()
    if problem := judge_tokens(mesh, client, outcome, token_ids):
        return problem
    if (failure := outcome.failure) is not None:
        given = isinstance(failure, ApiError)
        error = failure if given else error_from(failure, retry_after_s=1, default_param="prompt")
        mesh.counts["told"] += 1
        is_told = error.status == 503 and error.retry_after_s is not None
        return "" if is_told or error.code == "context_length_exceeded" else f"it is told {error.status} {failure}"
    if not outcome.num_ends:
        return "" if text.startswith(outcome.text) else f"{outcome.text!r} does not begin {text!r}"
    mesh.counts["whole"] += 1
    if outcome.num_ends > 1 or (outcome.text, outcome.finish_reason) != (text, reason):
        return f"{outcome.num_ends} times {outcome.text!r} ({outcome.finish_reason}) is not {text!r} ({reason})"
    return ""


async def _befall(mesh: EndingMesh, order: list[str], gaps_s: list[float], at_s: float) -> None:
    await asyncio.sleep(at_s)
    mesh.note_under_way()
    for host, gap_s in zip(order, gaps_s, strict=True):
        await asyncio.sleep(gap_s)
        mesh.enders[host].tell()
    await asyncio.gather(*(ender.is_over.wait() for ender in mesh.enders.values()))


async def _scenario(mesh: EndingMesh, clients: list[Client], befall: Coroutine[Any, Any, None]) -> list[str]:
    faults, mesh.network.faults = mesh.network.faults, Faults()
    await mesh.start()
    await mesh.until_all_serve()
    mesh.network.faults = faults
    befalling = asyncio.ensure_future(befall)
    problems = await ask_all(mesh, clients, _problem)
    await befalling
    return problems


def run_seed(seed: int) -> Counter[str]:
    """Run one seed; returns how often things came. Raises AssertionError with the messages and the replay."""
    draw = random.Random(f"ends/{seed}")
    clients = [replace(client, leaves_after_s=None) for client in draw_clients(draw, "")]
    bound_s = draw.choice([AMPLE_S, AMPLE_S, draw.choice(SHORT_S)])
    network = Faults() if draw.random() < 0.7 else replace(draw_faults(draw, ""), silent_s=HEARTBEAT_S)
    mesh = EndingMesh(seed, network, False, "", bound_s=bound_s)
    # A worker that ends because of its device while it drains has died, which other suites look at.
    mesh.devices.end()
    order = draw.sample(mesh.hosts, len(mesh.hosts))
    gap_s = draw.choice([0.0, 0.0, 0.002, 0.05, 1.0])
    gaps_s = [draw.random() * gap_s for _ in order]
    at_s = draw.choice(clients).arrives_s + draw.random() * draw.choice([0.1, 0.5, 3.0])
    told = (mesh.faults, f"{order} {gaps_s} at {at_s}, {bound_s=}", f"replay: python -m tests.simulation ends {seed}")
    play(mesh, _scenario(mesh, clients, _befall(mesh, order, gaps_s, at_s)), *told)
    assert not mesh.found, "\n".join([*mesh.found, mesh.network.report(60), *map(str, told)])
    return Counter(mesh.counts) + Counter({"under way": len(mesh.under_way), "clients": len(clients)})


def _all_tiers_at_once(next_tier: Any, self: Supervisor, now: float) -> None:
    next_tier(self, now)
    for watch in self.watches.values() if not self.stopped else ():
        if watch.state == READY:
            self._drain(watch, now)


def _at_once(wait: Any, ctx: Any, roles: Any) -> Any:
    async def nobody() -> None:
        """Return at once."""

    return nobody()


def _with_its_last_step(wake: Any, self: SchedulerActor) -> None:
    wake(self)
    if self.core is not None and self.core.handlers.is_draining and self.core.is_drained:
        self._drained.set()


ENDS: dict[str, Bug] = {
    "an ending host does not wait for those who need it": bug(27, (supervisor, "until_others_are_done", _at_once)),
    "all actors of a host end at once": bug(6, (Supervisor, "_next_tier", _all_tiers_at_once)),
    "who ends says nothing to its clients": bug(2, (GatewayService, "stop", nothing)),
    "a scheduler ends before its last tokens have come": bug(10, (SchedulerActor, "_wake", _with_its_last_step)),
    "a scheduler ends before its attempts do": bug(2, (SchedulerCore, "is_drained", property(returns(True)))),
}
"""A prefill scheduler that leaves what it was ordered to do is no such bug: decode computes it. That all tiers together
have the time of one is seen by the core's own machine, and that ending hosts do not count on each other by
`tests/cli/test_others.py`: here a decode host's scheduler ends last, with all that anybody needs.
"""

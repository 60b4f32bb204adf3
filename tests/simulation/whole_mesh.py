"""A whole mesh in one process on virtual time: every role's own actor over the simulated network, `echo` as its model.

Each actor is a `SimulatedProcess`, so that it can die anywhere; one that died is started again, in the next epoch, as
the supervisor does.

HTTP is left out (the gateway's service is driven directly) and the pools are bytearrays; everything else is what runs
in production. The echo model reads its answers back from the KV pages, so pages that went astray show in the text.
"""

import asyncio
import contextvars
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

from mesh.actor import Actor
from mesh.address import Address, Endpoint
from mesh.membership.view import READY
from mesh.options import SystemOptions
from mesh.simulation.faults import Faults
from mesh.simulation.network import SimulatedNetwork
from mesh.system import ActorSystem
from mesh.testing.processes import ProcessState, SimulatedProcess
from nodes.asks import RowReads
from nodes.asks.prompt_logprobs import PromptLogprobs
from nodes.detokenizer.actor import DetokenizerActor
from nodes.detokenizer.config import DetokenizerConfig
from nodes.gateway.admission.in_flight import Place
from nodes.gateway.clients import Client
from nodes.gateway.config import GatewayConfig
from nodes.gateway.jobs.validation import Job, TokenFields, Validator
from nodes.gateway.local import LocalGateway
from nodes.gateway.request_names import RequestNames
from nodes.gateway.requests.outputs import Generation
from nodes.kv_agent.actor import KVAgent
from nodes.kv_agent.config import KVAgentConfig, PoolConfig
from nodes.model_spec import resolve_model
from nodes.registry.actor import RegistryActor
from nodes.request import TOKENS, VECTORS
from nodes.scheduler.actor import SchedulerActor
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.metrics import leaks
from nodes.tokenizer.actor import TokenizerActor
from nodes.tokenizer.config import TokenizerConfig
from nodes.worker.config import WorkerConfig
from nodes.worker.draw.reads import echoed
from tests.simulation.bad_devices import BadDevices
from tests.simulation.bad_moments import BadMoments
from tests.simulation.deaths import MortalHost, MortalTransport
from tests.simulation.hardware import Lockstep, SlowWorker, corrupt_pages, slow_down
from tests.simulation.speeds import draw_speeds
from tests.simulation.watches import LateAsks, Tombstones, UnopenedGrants

CONTEXT_LENGTH = 512
CHUNK_TOKENS = 32
SETTLE_S = 60.0
QUANTUM_BYTES = 32
"""Copied at a time: a quarter of a page, so that a copy can be stopped in the middle of one."""
ZOMBIE_S = 8.0
"""How long actors may compute for clients that are gone: the lease at the registry, and a few asks to hear of it."""
ZOMBIES = ("_running", "_waiting")


class SimulatedBootstrap:
    """Says where the registry is, as the run directory does elsewhere."""

    def __init__(self) -> None:
        self.found: tuple[Address, Endpoint] | None = None

    def lookup(self) -> tuple[Address, Endpoint] | None:
        return self.found


@dataclass
class Outcome:
    """What one client saw of one sample; `extras` are what came beside each of its tokens."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    extras: list[bytes] = field(default_factory=list[bytes])
    vector: bytes = b""
    finish_reason: str | None = None
    failure: Any = None
    num_ends: int = 0
    stall_s: float = 0.0
    gateway_died: bool = False


@dataclass
class SimulatedMesh:
    """All actors of a mesh with one prefill group and one decode group (`mixed`: one group for both).

    `tp_sizes` are the tensor-parallel ranks of groups that have more than one; `unknown` the asks that a worker does
    not know, by its actor id.
    """

    seed: int
    faults: Faults
    mixed: bool = False
    theme: str = ""
    tp_sizes: dict[str, int] = field(default_factory=dict[str, int])
    unknown: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    systems: dict[str, ActorSystem] = field(default_factory=dict[str, ActorSystem])
    actors: dict[str, Any] = field(default_factory=dict[str, Any])
    processes: dict[str, SimulatedProcess] = field(default_factory=dict[str, SimulatedProcess])
    late_asks: LateAsks = field(default_factory=LateAsks)
    tombstones: Tombstones = field(default_factory=Tombstones)
    unopened: UnopenedGrants = field(default_factory=UnopenedGrants)
    failed_cores: list[str] = field(default_factory=list[str])
    deaths: Counter[str] = field(default_factory=Counter[str])
    gone: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self.network = SimulatedNetwork(self.seed, self.faults)
        self.host = MortalHost(self.seed)
        self.bootstrap = SimulatedBootstrap()
        self.random = random.Random(f"mesh/{self.seed}")
        self.speeds = draw_speeds(self.random, self.theme, self.groups)
        self.moments = BadMoments(self.seed, self.theme, self.groups, self.processes)
        self.devices = BadDevices(self.seed)
        self.errors: Counter[str] = Counter()
        self.lockstep = Lockstep()
        dice = random.Random(f"depth/{self.seed}")
        self.says_more = dice.random() < 0.5
        self.depths = {group: dice.choice([1, 2]) for group in self.groups}
        self._is_stopping = False
        self.makers: dict[str, Callable[[], Actor]] = {}
        self._dead: dict[SimulatedProcess, asyncio.Event] = {}
        self._restarts: set[asyncio.Task[None]] = set()
        self._outside = contextvars.copy_context()

    @property
    def groups(self) -> list[str]:
        return ["mixed-0"] if self.mixed else ["prefill-0", "decode-0"]

    @property
    def present_groups(self) -> list[str]:
        """The groups without those that are gone for good."""
        return [group for group in self.groups if f"scheduler-{group}" not in self.gone]

    def worker_ids(self, group: str) -> tuple[str, ...]:
        """Actor ids of a group's workers, by rank."""
        return tuple(f"worker-{group}.{rank}" if rank else f"worker-{group}" for rank in range(self.tp_size(group)))

    def tp_size(self, group: str) -> int:
        return self.tp_sizes.get(group, 1)

    async def start(self) -> None:
        """Start everything at once, as the supervisor does, and wait until requests can be served."""
        makers: dict[str, Callable[[], Actor]] = {"registry": RegistryActor}
        for agent in dict.fromkeys(self.agent_of(group) for group in self.groups):
            groups = [group for group in self.groups if self.agent_of(group) == agent]
            makers[agent] = lambda agent=agent, groups=groups: self._agent(agent, groups)
        for group in self.groups:
            makers |= self._engine(group)
        tokenizer = TokenizerConfig(model="echo", context_length=CONTEXT_LENGTH, use_threads=False, use_processes=False)
        makers[self.edge_id("tokenizer-0")] = lambda: TokenizerActor(tokenizer)
        detokenizer = DetokenizerConfig(model="echo", use_threads=False)
        for number in range(2):
            makers[self.edge_id(f"detokenizer-{number}")] = lambda: DetokenizerActor(detokenizer)
        gateway = GatewayConfig(
            model_name="echo",
            model="echo",
            context_length=CONTEXT_LENGTH,
            prepare_timeout_s=2.0,
            # Where each fifth message is lost and each twentieth ends its link, a dead scheduler was back after 37 s,
            # and a tokenizer was reached too late after 60 (`disks`, seed 1005).
            role_wait_s=120.0,
            # Two deaths, with each 25th message lost and each 8th late, took five in a minute (`scenario`, seed 1994).
            # The gateway's own tests check that it does not try for ever.
            max_attempts=8,
        )
        self.validator = Validator(gateway)
        makers[self.gateway_id] = lambda: LocalGateway(gateway)
        self.makers = makers | self.makers
        for actor_id in self.makers:
            if actor_id not in self.gone:
                await self.start_actor(actor_id, self.next_epoch(actor_id, 0))
        while not self._is_serving():
            await asyncio.sleep(0.05)

    @property
    def gateway_id(self) -> str:
        """The gateway that all clients call."""
        return self.edge_id("gateway-0")

    def edge_id(self, actor_id: str) -> str:
        """The id of an actor that belongs to no group."""
        return actor_id

    def agent_of(self, group: str) -> str:
        """Actor id of the kv_agent that has the group's pools."""
        return "kv-agent-0"

    def memory_of(self, actor_id: str) -> MortalHost:
        """The shared memory of the actor's host."""
        return self.host

    def _agent_config(self, groups: list[str]) -> KVAgentConfig:
        spec, num_pages = resolve_model("echo"), {"prefill-0": self.speeds.num_prefill_pages}
        pools = [
            PoolConfig(
                group=group,
                num_pages=num_pages.get(group.partition(".")[0], self.speeds.num_pages),
                layout=spec.kv_layout("float32", 16, rank, self.tp_size(group)),
            )
            for group in groups
            for rank in range(self.tp_size(group))
        ]
        return KVAgentConfig(pools=pools, unlink_on_stop=False, quantum_bytes=QUANTUM_BYTES)

    def _agent(self, agent: str, groups: list[str]) -> KVAgent:
        return KVAgent(self._agent_config(groups), self.memory_of(agent))

    def _engine(self, group: str) -> dict[str, Callable[[], Actor]]:
        """A group's workers and its scheduler."""
        makers: dict[str, Callable[[], Actor]] = {}
        model = f"echo?step_ms={self.speeds.step_ms[group]}&token_us=50"
        for rank, actor_id in enumerate(self.worker_ids(group)):
            worker = self._worker_config(group, model, rank)
            makers[actor_id] = lambda worker=worker: self._worker(worker)
        scheduler, actor_id = self._scheduler(group, resolve_model("echo")), f"scheduler-{group}"
        makers[actor_id] = lambda: SchedulerActor(scheduler, self.memory_of(actor_id))
        return makers

    def _is_serving(self) -> bool:
        gateway = self.actors[self.gateway_id]
        return gateway._service is not None and not gateway.service.missing_roles()

    def _worker_config(self, group: str, model: str, rank: int) -> WorkerConfig:
        return WorkerConfig(
            group=group, model=model, agent=self.agent_of(group), tp_rank=rank, tp_size=self.tp_size(group),
            workers=self.worker_ids(group), adopt_grace_s=1.0, pooling="mean",
        )  # fmt: skip

    def _worker(self, config: WorkerConfig) -> SlowWorker:
        actor_id = self.worker_ids(config.group)[config.tp_rank]
        worker = SlowWorker(config, self.memory_of(actor_id), kill=lambda: self.processes[actor_id].die())
        worker.errors, worker.moments, worker.lockstep = self.errors, self.moments, self.lockstep
        worker.devices = self.devices
        worker.depth, worker.says_more = self.depths.get(config.group, 1), self.says_more
        worker.unknown = self.unknown.get(actor_id, frozenset())
        return worker

    def _scheduler(self, group: str, spec: Any) -> SchedulerConfig:
        return SchedulerConfig(
            group=group,
            phase=group.partition("-")[0],  # type: ignore[arg-type]
            worker=f"worker-{group}",
            workers=self.worker_ids(group),
            agent=self.agent_of(group),
            context_length=CONTEXT_LENGTH,
            eos_token_ids=spec.eos_token_ids,
            max_running=16,
            chunk_tokens=CHUNK_TOKENS,
            step_tokens=64,
            local_prefill_max=24,
            # Longer than any step stalls that ends at all. Ranks that wait for each other for ever must show.
            step_deadline_s=5.0 if self.tp_size(group) == 1 else 600.0,
            token_deadline_s=0.05,
            # Of its own draw, so that no other choice of a seed depends on it: one step at a time, a few, eight.
            plan_horizon_s=random.Random(f"horizon/{self.seed}").choice([0.0, 0.01, 0.1, 0.1]),
        )

    async def start_actor(self, actor_id: str, epoch: int) -> None:
        actor = self.makers[actor_id]()
        address = Address(actor_id, epoch)
        options = self._options(actor_id, random.Random(f"{actor_id}/{epoch}/{self.seed}"))
        process = SimulatedProcess(address, self.network, self._on_death)
        transport = self._transport(address, process)

        async def make() -> ActorSystem:
            return ActorSystem(actor, address, transport, self.bootstrap, options)

        self.processes[actor_id] = process
        system = self.systems[actor_id] = await process.spawn(make())
        self.actors[actor_id] = actor
        self.late_asks.watch(actor, process)
        if isinstance(actor, KVAgent):
            dice = random.Random(f"cancels/{self.seed}/{epoch}")
            slow_down(actor, self.speeds.copy_s, self.speeds.most_late, self.moments, dice)
            self.tombstones.watch(actor)
            self.unopened.watch(actor)
        started = process.spawn(system.start())
        if actor_id == "registry":
            await asyncio.wait([started], timeout=1.0)
            self.bootstrap.found = (address, system.describe().endpoint)
        # Like processes: all start at once, none waits for another.
        self._keep(started)
        self._keep(asyncio.get_running_loop().create_task(self._end_when_asked(system, process)))

    def _transport(self, address: Address, process: SimulatedProcess) -> MortalTransport:
        return MortalTransport(self.network, address, process)

    def _options(self, actor_id: str, dice: random.Random) -> SystemOptions:
        return SystemOptions(host="sim", pid=1, random=dice)

    async def _end_when_asked(self, system: ActorSystem, process: SimulatedProcess) -> None:
        # While everything is being stopped, ranks miss each other, and are stopped themselves.
        reason = await system.shutdown_asked()
        if "its core" in reason:
            self.failed_cores.append(f"{system.address}: {reason}")
        if reason != "stopped" and not self._is_stopping:
            process.kill()

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    def _on_death(self, process: SimulatedProcess) -> None:
        self.deaths[process.name.partition("-")[0].partition(".")[0]] += 1
        self._dead.setdefault(process, asyncio.Event()).set()
        if process.name in self.gone:
            return
        # Not in the context of the process, which is dead.
        task = self._outside.run(asyncio.get_running_loop().create_task, self._restart(process.address))
        self._keep(task)

    async def _restart(self, address: Address) -> None:
        is_prefill = address.actor_id == "scheduler-prefill-0"
        after_s = self.speeds.prefill_restart_s if is_prefill else self.speeds.restart_s
        await asyncio.sleep(self.random.uniform(*after_s))
        if self.is_wanted(address):
            await self.start_actor(address.actor_id, self.next_epoch(*address))

    def is_wanted(self, dead: Address) -> bool:
        """Whether an actor that died is to be started again."""
        process = self.processes[dead.actor_id]
        return dead.actor_id not in self.gone and process.address == dead and process.state is ProcessState.DEAD

    def next_epoch(self, actor_id: str, last: int) -> int:
        """The epoch of an actor's next start, as its supervisor gives it with `last` on file."""
        return last + 1

    def lose_pool(self, group: str) -> None:
        """The segment of one rank is gone, with everything in it, and its agent too."""
        name = KVAgentConfig(pools=[]).prefix + group
        rank = self.random.randrange(self.tp_size(group)) if self.tp_size(group) > 1 else 0
        self.host.unlink(self.host.path(f"{name}.{rank}" if rank else name))
        self.deaths["lost pools"] += 1
        self.processes["kv-agent-0"].kill()

    async def until_due(self, after_s: float) -> None:
        """Return when what is drawn for `after_s` from now is to happen: some suites wait for a worse moment."""
        await asyncio.sleep(after_s)

    async def hang(self, actor_id: str, after_s: float, *, kill: bool) -> None:
        """Stop an actor for a while, as a SIGSTOP or a sleeping host would; `kill`: then kill it, as a supervisor."""
        process = self.processes[actor_id]
        if process.state is not ProcessState.RUNNING:
            return
        self.deaths["hangs"] += 1
        process.stop()
        await asyncio.sleep(after_s)
        if kill:
            process.kill()
        else:
            process.go_on()

    async def request(
        self,
        body: bytes,
        request_id: str,
        *,
        abandon_after_s: float | None = None,
        prompt_top: int = -1,
        kind: str = TOKENS,
    ) -> list[Outcome]:
        """One client's call. Returns its samples' outcomes; if it is abandoned, what came until then.

        The same if the gateway dies, with `gateway_died` set. With a `prompt_top` of 0 or more its prompt is read; with
        another `kind` than `TOKENS` it wants a vector.
        """
        while self.actors[self.gateway_id]._service is None:
            # Nobody listens: a client would try again.
            await asyncio.sleep(0.1)
        process, service = self.processes[self.gateway_id], self.actors[self.gateway_id].service
        outcomes: list[Outcome] = []
        died = asyncio.ensure_future(self._dead.setdefault(process, asyncio.Event()).wait())
        job = self._job(body, request_id, prompt_top)
        if kind != TOKENS:
            prepare = msgspec.structs.replace(job.prepare, asks=[VECTORS])
            job = job._replace(kind=kind, asks=[], prepare=prepare, tokens=TokenFields())
        task = process.spawn(self._request(service, job, abandon_after_s, outcomes))
        await asyncio.wait([task, died], return_when=asyncio.FIRST_COMPLETED)
        if not died.done():
            died.cancel()
            await task
        for outcome in outcomes:
            outcome.gateway_died = died.done() and not died.cancelled()
        return outcomes

    def _job(self, body: bytes, request_id: str, prompt_top: int) -> Job:
        job = self.validator.text(body, request_id)._replace(tokens=TokenFields(ids=True))
        if prompt_top < 0:
            return job
        ask = PromptLogprobs(prompt_top)
        prepare = msgspec.structs.replace(job.prepare, asks=[*job.prepare.asks, ask.name])
        tokens = job.tokens._replace(prompt_reads=ask.reads_of_prompt())
        return job._replace(asks=[*job.asks, ask], prepare=prepare, tokens=tokens)

    async def _request(self, service: Any, job: Job, abandon_after_s: float | None, outcomes: list[Outcome]) -> None:
        track = service.account.begin(RequestNames(job.prepare.request_id), service.now())
        prepared = await service.tokenizers.prepare(job.prepare, prompt_param=job.prompt_param)
        track.prepared(service.now(), prepared.elapsed_s)
        # Two clients, told apart by what a seed draws anyway.
        place = Place(Client("odd" if len(prepared.token_ids[0]) % 2 else "even"))
        generation = service.open(job, prepared, track.arrived_at, place=place, track=track)
        outcomes.extend(Outcome() for _ in generation.request_ids)
        leaves_at = None if abandon_after_s is None else service.now() + abandon_after_s
        while not (all(outcome.num_ends for outcome in outcomes) or any(outcome.failure for outcome in outcomes)):
            try:
                async with asyncio.timeout_at(leaves_at):
                    await generation.output.wait()
            except TimeoutError:
                service.abandon(generation)
                break
            for piece in generation.output.take():
                outcome = outcomes[piece.number]
                outcome.text += piece.text
                if job.tokens.prompt_reads is not None and (piece.end is None or piece.end.failure is None):
                    _look_at_prompt(generation, piece.number, job.tokens.prompt_reads)
                if piece.tokens is not None:
                    outcome.token_ids += piece.tokens.ids
                    outcome.extras += piece.tokens.extras
                outcome.vector = generation.output.samples[piece.number].vector or b""
                if piece.end is not None:
                    outcome.num_ends += 1
                    outcome.finish_reason = piece.end.finish_reason
                    outcome.failure, outcome.stall_s = piece.end.failure, piece.end.stall_s
        # One sample that failed ends the call, as on the HTTP side.
        service.abandon(generation)
        service.account.end(track, 200, "")

    async def settle(self) -> None:
        """End all faults: within a bounded time nothing is held by anyone. Raises AssertionError naming what is."""
        self.network.calm()
        self.moments.end()
        self.devices.end()
        for process in self.processes.values():
            process.disarm()
        await self._until_none(ZOMBIE_S, lambda: self.held(ZOMBIES))
        await self._until_none(SETTLE_S, lambda: [*self._absent(), *self.held(), *self._leaks()])
        for group in self.present_groups:
            core = self.actors[f"scheduler-{group}"].core
            core.assert_idle()
            assert core.books.cache.check() == []
            table = self.actors[f"scheduler-{group}"]._pool.table()
            for worker in self.worker_ids(group):
                corrupt = list(corrupt_pages(self.actors[worker]._pool, table))
                assert not corrupt, (worker, corrupt)
        assert not (problems := self.lockstep.problems()), problems

    @staticmethod
    async def _until_none(limit_s: float, look: Callable[[], list[str]]) -> None:
        deadline = asyncio.get_running_loop().time() + limit_s
        while left := look():
            assert asyncio.get_running_loop().time() < deadline, f"still there after {limit_s:g} s: {left}"
            await asyncio.sleep(0.25)

    def _absent(self) -> list[str]:
        """Actors that have died and are not back yet, and those that are gone but members."""
        registry = self.actors["registry"]
        if registry._core is None:
            return ["the registry has not started"]
        ready = {one.actor_id: one.epoch for one in registry.core.members() if one.state == READY}
        absent = [
            f"{actor_id} is not ready"
            for actor_id, process in self.processes.items()
            if actor_id not in self.gone
            and (
                process.state is not ProcessState.RUNNING
                or (actor_id != "registry" and ready.get(actor_id) != process.address.epoch)
            )
        ]
        return absent + [f"{actor_id} is gone, and a member" for actor_id in self.gone & ready.keys()]

    def _leaks(self) -> list[str]:
        """What a scheduler holds that is in none of its figures, such as asks without an answer."""
        cores = {group: self.actors[f"scheduler-{group}"].core for group in self.present_groups}
        return [f"{group} holds {leak}" for group, core in cores.items() if core is not None for leak in leaks(core)]

    def held(self, names: tuple[str, ...] = ()) -> list[str]:
        """What actors hold for requests, by actor; only `names` if there are any."""
        left: list[str] = []
        for actor_id, actor in self.actors.items():
            if actor_id in self.gone:
                continue
            for name, value in actor.stats().items():
                bare = name.partition("{")[0]
                is_page = not names and any(f'state="{state}"' in name for state in PAGE_STATES)
                if value and (bare.endswith(names or HELD) or is_page):
                    left.append(f"{actor_id} {name}={value:g}")
        return left

    async def stop(self) -> None:
        """Stop all systems."""
        self._is_stopping = True
        for actor_id in reversed([one for one in self.systems if one not in self.gone]):
            await self.processes[actor_id].spawn(self.systems[actor_id].stop())

    def bury(self) -> None:
        """The run is over, however it ended."""
        for process in [*self._dead, *self.processes.values()]:
            process.bury()


def _look_at_prompt(generation: Generation, number: int, reads: RowReads) -> None:
    """Before the first output there is all that was read of the prompt, whatever was lost, sent again or begun anew."""
    prompt = generation.prompts[number]
    said = zip(count(1), prompt, prompt[1:], strict=False)
    expected = b"".join(echoed(at, before, token_id, reads) for at, before, token_id in said)
    assert generation.output.prompt_of(number) == expected, f"what was read of {bytes(prompt)!r} is not what was said"


HELD = ("_running", "_waiting", "_grants", "_orders", "_streams", "_inflight", "_finished", "_grants_open", "_held")
PAGE_STATES = ("running", "granted", "in_flight", "quarantined")

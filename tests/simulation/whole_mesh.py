"""A whole mesh in one process on virtual time: every role's own actor over the simulated network, `echo` as its model.

HTTP is left out (the gateway's service is driven directly) and the pools are bytearrays; everything else is what runs
in production. The echo model reads its answers back from the KV pages, so pages that went astray show in the text.
"""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

from kvstore.page_pool import HeapHost
from mesh.actor import Actor
from mesh.address import Address, Endpoint
from mesh.options import SystemOptions
from mesh.system import ActorSystem
from mesh.transport.faults import Faults
from mesh.transport.simulation import SimulatedNetwork
from nodes.detokenizer.actor import DetokenizerActor
from nodes.detokenizer.config import DetokenizerConfig
from nodes.gateway.actor import Gateway
from nodes.gateway.config import GatewayConfig
from nodes.gateway.validation import Validator
from nodes.kv_agent.actor import KVAgent
from nodes.kv_agent.config import KVAgentConfig, PoolConfig
from nodes.model_spec import resolve_model
from nodes.registry.actor import RegistryActor
from nodes.scheduler.actor import SchedulerActor
from nodes.scheduler.config import SchedulerConfig
from nodes.tokenizer.actor import TokenizerActor
from nodes.tokenizer.config import TokenizerConfig
from nodes.worker.actor import WorkerActor
from nodes.worker.config import WorkerConfig

MODEL = "echo?step_ms=2&token_us=50"
CONTEXT_LENGTH = 512
NUM_PAGES = 96
SETTLE_S = 60.0


class SimulatedBootstrap:
    """Where the registry is, as the run directory says it elsewhere."""

    def __init__(self) -> None:
        self.found: tuple[Address, Endpoint] | None = None

    def lookup(self) -> tuple[Address, Endpoint] | None:
        return self.found


@dataclass
class Outcome:
    """What one client saw of one sample."""

    text: str = ""
    finish_reason: str | None = None
    failure: Any = None
    num_ends: int = 0


@dataclass
class SimulatedMesh:
    """All actors of a mesh with one prefill group and one decode group (`mixed`: one group for both)."""

    seed: int
    faults: Faults
    mixed: bool = False
    systems: dict[str, ActorSystem] = field(default_factory=dict[str, ActorSystem])
    actors: dict[str, Any] = field(default_factory=dict[str, Any])
    late_asks: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.network = SimulatedNetwork(self.seed, self.faults)
        self.host = HeapHost()
        self.bootstrap = SimulatedBootstrap()
        self.random = random.Random(f"mesh/{self.seed}")

    @property
    def groups(self) -> list[str]:
        return ["mixed-0"] if self.mixed else ["prefill-0", "decode-0"]

    async def start(self) -> None:
        """Start everything at once, as the supervisor does, and wait until requests can be served."""
        spec = resolve_model(MODEL)
        layout = spec.kv_layout("float32", 16)
        await self._add("registry", RegistryActor())
        pools = [PoolConfig(group=group, num_pages=NUM_PAGES, layout=layout) for group in self.groups]
        await self._add("kv-agent-0", KVAgent(KVAgentConfig(pools=pools), self.host))
        for group in self.groups:
            config = WorkerConfig(group=group, model=MODEL, agent="kv-agent-0")
            await self._add(f"worker-{group}", WorkerActor(config, self.host))
            await self._add(f"scheduler-{group}", SchedulerActor(self._scheduler(group, spec), self.host))
        tokenizer = TokenizerConfig(model=MODEL, context_length=CONTEXT_LENGTH, use_threads=False, use_processes=False)
        await self._add("tokenizer-0", TokenizerActor(tokenizer))
        for number in range(2):
            config = DetokenizerConfig(model=MODEL, use_threads=False)
            await self._add(f"detokenizer-{number}", DetokenizerActor(config))
        gateway = GatewayConfig(
            model_name="echo", model=MODEL, context_length=CONTEXT_LENGTH, prepare_timeout_s=2.0, role_wait_s=60.0
        )
        self.validator = Validator(gateway)
        await self._add("gateway-0", Gateway(gateway, serve_http=False))
        while not self._is_serving():
            await asyncio.sleep(0.05)

    def _is_serving(self) -> bool:
        gateway = self.actors["gateway-0"]
        return gateway._service is not None and not gateway.service.missing_roles()

    def _scheduler(self, group: str, spec: Any) -> SchedulerConfig:
        return SchedulerConfig(
            group=group,
            phase=group.partition("-")[0],  # type: ignore[arg-type]
            worker=f"worker-{group}",
            agent="kv-agent-0",
            context_length=CONTEXT_LENGTH,
            eos_token_ids=spec.eos_token_ids,
            max_running=16,
            chunk_tokens=32,
            step_tokens=64,
            local_prefill_max=24,
        )

    async def _add(self, actor_id: str, actor: Actor) -> None:
        address = Address(actor_id, 1)
        options = SystemOptions(host="sim", pid=1, random=random.Random(f"{actor_id}/{self.seed}"))
        system = ActorSystem(actor, address, self.network.transport(address), self.bootstrap, options)
        self._watch_asks(actor, actor_id)
        self.systems[actor_id] = system
        self.actors[actor_id] = actor
        if actor_id == "registry":
            await system.start()
            self.bootstrap.found = (address, system.describe().endpoint)
        else:
            # Like processes: all start at once, none waits for another.
            self._starting = [*getattr(self, "_starting", []), asyncio.ensure_future(system.start())]

    def _watch_asks(self, actor: Actor, actor_id: str) -> None:
        """Note every ask that outlives its deadline."""
        ask = actor.ctx.ask
        loop = asyncio.get_running_loop()

        async def timed(to: str, message: Any, *, timeout_s: float, **options: Any) -> Any:
            deadline = loop.time() + timeout_s
            try:
                return await ask(to, message, timeout_s=timeout_s, **options)
            finally:
                if loop.time() > deadline + 1e-6:
                    self.late_asks.append(f"{actor_id} -> {to} {type(message).__name__}")

        actor.ctx.ask = timed  # type: ignore[method-assign]

    @property
    def service(self) -> Any:
        return self.actors["gateway-0"].service

    async def request(self, body: bytes, request_id: str, *, abandon_after_s: float | None = None) -> list[Outcome]:
        """One client's call, its samples' outcomes; abandoned ones return what came until then."""
        job = self.validator.text(body, request_id)
        arrived_at = self.service.now()
        prepared = await self.service.prepare(job.prepare, prompt_param=job.prompt_param)
        generation = self.service.open(job, prepared, arrived_at)
        outcomes = [Outcome() for _ in generation.request_ids]
        leaves_at = None if abandon_after_s is None else self.service.now() + abandon_after_s
        while not all(outcome.num_ends for outcome in outcomes):
            try:
                async with asyncio.timeout_at(leaves_at):
                    await generation.output.wait()
            except TimeoutError:
                self.service.abandon(generation)
                break
            for piece in generation.output.take():
                outcome = outcomes[piece.number]
                outcome.text += piece.text
                if piece.end is not None:
                    outcome.num_ends += 1
                    outcome.finish_reason = piece.end.finish_reason
                    outcome.failure = piece.end.failure
        return outcomes

    async def settle(self) -> None:
        """No faults any more: within a bounded time nothing is held by anyone. Raises AssertionError naming what is."""
        self.network.calm()
        deadline = asyncio.get_running_loop().time() + SETTLE_S
        while left := self.held():
            assert asyncio.get_running_loop().time() < deadline, f"still held after {SETTLE_S} s: {left}"
            await asyncio.sleep(0.25)
        for group in self.groups:
            core = self.actors[f"scheduler-{group}"]._core
            core.assert_idle()
            assert core.cache.check() == []

    def held(self) -> list[str]:
        """What somebody holds for a request, by actor."""
        left: list[str] = []
        for actor_id, actor in self.actors.items():
            for name, value in actor.stats().items():
                bare = name.partition("{")[0]
                if value and (bare.endswith(HELD) or any(f'state="{state}"' in name for state in PAGE_STATES)):
                    left.append(f"{actor_id} {name}={value:g}")
        return left

    async def stop(self) -> None:
        """Stop all systems."""
        for system in reversed(list(self.systems.values())):
            await system.stop()


HELD = ("_running", "_waiting", "_grants", "_orders", "_streams", "_inflight", "_finished", "_grants_open", "_held")
PAGE_STATES = ("running", "granted", "in_flight", "quarantined")

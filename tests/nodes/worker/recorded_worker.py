"""A worker's actor over a context that records what it does; the agent's answers are given."""

import asyncio
from types import SimpleNamespace
from typing import Any

from kvstore.pool.page_pool import HeapHost, PoolInfo
from kvstore.protocol import MapPool, PoolHandle
from mesh.address import Address
from mesh.membership.view import Membership
from mesh.runtime.telemetry import Metrics
from nodes.model_spec import Quantization, resolve_model
from nodes.protocol import Adopt, StepPlan
from nodes.worker.actor import WorkerActor
from nodes.worker.config import WorkerConfig
from tests.nodes.step_plans import Row, plan_of

SCHEDULER = Address("scheduler-0", 3)


class RecordedContext:
    """What the actor does, in lists; the agent's answers are given."""

    def __init__(self, answers: list[Any]) -> None:
        self.address = Address("worker-0", 5)
        self.metrics = Metrics()
        self.log = SimpleNamespace(**dict.fromkeys(("info", "debug", "warning", "error"), lambda *_, **__: None))
        self.answers = answers
        self.told: list[tuple[str, Any]] = []
        self.announced: list[tuple[str, dict]] = []
        self.news = asyncio.Event()
        self.members = Membership()
        self.ended: list[str] = []

    def end(self, reason: str) -> None:
        self.ended.append(reason)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def tell(self, actor_id: str, message: Any, buffers: Any = (), **_: Any) -> bool:
        self.told.append((actor_id, message))
        self.news.set()
        return True

    async def ask(self, actor_id: str, message: Any, *, timeout_s: float) -> Any:
        assert (actor_id, message) == ("agent-0", MapPool(group="g"))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(message=answer)

    def announce(self, state: str, **attributes: Any) -> None:
        self.announced.append((state, attributes))

    def later(self, delay_s: float, callback: Any, *args: Any) -> Any:
        return asyncio.get_running_loop().call_later(delay_s, callback, *args)

    def spawn(self, coroutine: Any, *, name: str | None = None) -> asyncio.Task:
        return asyncio.get_running_loop().create_task(coroutine)

    async def until_told(self, count: int) -> None:
        while len(self.told) < count:
            self.news.clear()
            await self.news.wait()


class RecordedCall:
    def __init__(self, message: Any) -> None:
        self.message, self.answer = message, None

    def reply(self, message: Any) -> None:
        self.answer = message

    def fail(self, code: str, message: str, **_: Any) -> None:
        self.answer = code


def pool(host: HeapHost, model: str = "echo", quantize: Quantization = "none") -> PoolHandle:
    layout = resolve_model(model).quantized(quantize).kv_layout()
    made = host.create("g", PoolInfo(group="g", num_pages=20, layout=layout, incarnation=1))
    return PoolHandle(group="g", agent="agent-0", path=made.path, num_pages=20, layout=layout, incarnation=1)


def config(model: str = "echo") -> WorkerConfig:
    return WorkerConfig(group="g", model=model, agent="agent-0", map_retry_s=0.001)


def plan(step: int, tokens: list[int], start: int = 0, epoch: int = 1) -> tuple[StepPlan, list[bytes]]:
    return plan_of(step, [Row(1, tokens, [4, 5], start, 3 if start else len(tokens))], epoch)


async def started(actor: WorkerActor, *answers: Any) -> RecordedContext:
    actor.ctx = context = RecordedContext(list(answers))
    await actor.start()
    return context


def adopt(actor: WorkerActor, epoch: int = 1) -> Any:
    call = RecordedCall(Adopt(scheduler_epoch=epoch))
    actor.on_ask(call)
    return call.answer


async def working(model: str = "echo", *runner: Any, epoch: int = 1) -> tuple[WorkerActor, RecordedContext]:
    """A worker that has started with a pool of its own, and was adopted; `runner` and what follows it as it takes."""
    host = HeapHost()
    actor = WorkerActor(config(model), host, *runner)
    context = await started(actor, pool(host, model.partition("?")[0]))
    adopt(actor, epoch)
    return actor, context

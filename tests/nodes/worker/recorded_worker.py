"""A worker's actor over a context that records what it does; the agent's answers are given."""

from typing import Any

from kvstore.pool.page_pool import HeapHost, PoolInfo
from kvstore.protocol import MapPool, PoolHandle
from mesh.address import Address
from nodes.model_spec import Quantization, resolve_model
from nodes.protocol import Adopt, StepPlan
from nodes.worker.actor import WorkerActor
from nodes.worker.config import WorkerConfig
from tests.mesh.recorded_call import RecordedCall
from tests.nodes.recording_context import RecordingContext
from tests.nodes.step_plans import Row, plan_of

SCHEDULER = Address("scheduler-0", 3)


def context_of(*answers: Any) -> RecordingContext:
    """That of an actor whose agent gives these answers, one after the other."""
    given = iter(answers)

    async def answer(actor_id: str, message: Any) -> Any:
        assert (actor_id, message) == ("agent-0", MapPool(group="g"))
        found = next(given)
        if isinstance(found, Exception):
            raise found
        return found

    return RecordingContext(Address("worker-0", 5), answer)


def pool(host: HeapHost, model: str = "echo", quantize: Quantization = "none") -> PoolHandle:
    layout = resolve_model(model).quantized(quantize).kv_layout()
    made = host.create("g", PoolInfo(group="g", num_pages=20, layout=layout, incarnation=1))
    return PoolHandle(group="g", agent="agent-0", path=made.path, num_pages=20, layout=layout, incarnation=1)


def config(model: str = "echo") -> WorkerConfig:
    return WorkerConfig(group="g", model=model, agent="agent-0", map_retry_s=0.001)


def plan(step: int, tokens: list[int], start: int = 0, epoch: int = 1) -> tuple[StepPlan, list[bytes]]:
    return plan_of(step, [Row(1, tokens, [4, 5], start, 3 if start else len(tokens))], epoch)


async def started(actor: WorkerActor, *answers: Any) -> RecordingContext:
    actor.ctx = context = context_of(*answers)
    await actor.start()
    return context


def adopt(actor: WorkerActor, epoch: int = 1) -> Any:
    call = RecordedCall(Adopt(scheduler_epoch=epoch))
    actor.on_ask(call)
    return call.answer


async def working(model: str = "echo", *runner: Any, epoch: int = 1) -> tuple[WorkerActor, RecordingContext]:
    """A worker that has started with a pool of its own, and was adopted; `runner` and what follows it as it takes."""
    host = HeapHost()
    actor = WorkerActor(config(model), host, *runner)
    context = await started(actor, pool(host, model.partition("?")[0]))
    adopt(actor, epoch)
    return actor, context

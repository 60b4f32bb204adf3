"""The worker's actor over a pool on a device: what it tells when, and in which order it lets go of the device."""

import asyncio
import threading
from typing import Any

import msgspec
import pytest

from kvstore.errors import PoolMismatch
from kvstore.pool.cuda.pool import CudaHost
from kvstore.pool.page_pool import HeapHost, PagePool, PoolInfo
from kvstore.protocol import PoolHandle
from mesh.address import Endpoint
from mesh.membership.view import Member
from nodes.model_spec import resolve_model
from nodes.worker.actor import WorkerActor
from nodes.worker.steps.step import RunnableStep, StepOutcome
from tests.kvstore.fake_devices import FakeCards, FakeDeviceMemory
from tests.mesh.mesh_under_test import until
from tests.nodes.recording_context import RecordingContext
from tests.nodes.step_plans import Row, plan_of
from tests.nodes.worker.recorded_worker import SCHEDULER, adopt, config, context_of, plan

MODEL = "random:tiny-llama"


class GatedDevice:
    """A runner whose steps end when the test lets them: `gate` is the event behind each. Uses its pool until then."""

    numerics = "gated"

    def __init__(self, pool: PagePool, log: list[str]) -> None:
        self.pages = pool.device_pages
        self.gate = threading.Event()
        self.log = log

    def launch(self, step: RunnableStep) -> RunnableStep:
        self.log.append(f"launch {step.step}")
        return step

    def finish(self, launched: RunnableStep) -> StepOutcome:
        assert self.gate.wait(10)
        self.log.append(f"event {launched.step}")
        return StepOutcome([-1 if row.sampling is None else 7 for row in launched.rows])

    def run(self, step: RunnableStep) -> StepOutcome:
        return self.finish(self.launch(step))

    def synchronize(self) -> None:
        assert self.gate.wait(10)
        self.log.append("synchronize")


class LoggedMemory(FakeDeviceMemory):
    def __init__(self, cards: FakeCards, log: list[str]) -> None:
        super().__init__(cards)
        self.log = log

    def close(self, device: int, pointer: int) -> None:
        self.log.append("unmap")
        super().close(device, pointer)


class Bench:
    """An agent's pool on a fake device, and a worker of another process over it."""

    def __init__(self) -> None:
        cards, tables, self.log = FakeCards(num_bytes=1 << 24), HeapHost(), []
        self.agent = FakeDeviceMemory(cards)
        layout = resolve_model(MODEL).kv_layout()
        info = PoolInfo(group="g", num_pages=20, layout=layout, incarnation=1, device="cuda:0")
        self.pool = CudaHost(tables, lambda: self.agent).create("g", info)
        self.handle = PoolHandle(
            group="g", agent="agent-0", path=self.pool.path, num_pages=20, layout=layout, incarnation=1, device="cuda:0"
        )
        memory = LoggedMemory(cards, self.log)
        self.runners: list[GatedDevice] = []
        self.actor = WorkerActor(config(MODEL), CudaHost(tables, lambda: memory), self._make)

    def _make(self, _spec: Any, _config: Any, pool: PagePool) -> GatedDevice:
        self.runners.append(GatedDevice(pool, self.log))
        return self.runners[0]

    async def start(self, handle: PoolHandle | None = None) -> RecordingContext:
        self.actor.ctx = context = context_of(handle or self.handle)
        await self.actor.start()
        return context


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("draws", [True, False])
async def test_a_result_is_told_after_the_event_behind_its_step(bench: Bench, draws: bool) -> None:
    """A chunk in the middle of a prompt draws nothing; its pages are announced, and copied, all the same."""

    context = await bench.start()
    adopt(bench.actor)
    row = Row(1, [7, 8, 9], [4], prompt=3) if draws else Row(1, [7, 8, 9], [4], prompt=9, sampling=None)
    bench.actor.on_tell(SCHEDULER, *plan_of(1, [row]))
    await until(lambda: "launch 1" in bench.log)
    await asyncio.sleep(0.02)
    assert context.told == []
    bench.runners[0].gate.set()
    await context.until_told(1)
    assert bench.log == ["launch 1", "event 1"]
    assert context.told[0][1].token_ids == [7 if draws else -1]
    await bench.actor.stop()


async def test_pages_are_unmapped_when_nothing_runs_on_the_device_any_more(bench: Bench) -> None:
    await bench.start()
    adopt(bench.actor)
    bench.actor.on_tell(SCHEDULER, *plan(1, [7, 8, 9]))
    bench.actor.on_tell(SCHEDULER, *plan(2, [7], start=3))
    bench.actor.on_tell(SCHEDULER, *plan(3, [7], start=4))
    await until(lambda: "launch 2" in bench.log)
    stopping = asyncio.create_task(bench.actor.stop())
    await asyncio.sleep(0.02)
    assert "unmap" not in bench.log
    bench.runners[0].gate.set()
    await stopping
    # The thread that waits for steps and the one that waits for all there is may log in either order.
    assert bench.log[-1] == "unmap"
    assert "synchronize" in bench.log
    assert "launch 3" not in bench.log, "nothing begins after the end has begun"
    bench.pool.close()


async def test_a_device_that_failed_does_not_keep_the_worker(bench: Bench) -> None:
    await bench.start()

    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    bench.runners[0].synchronize = fail
    await bench.actor.stop()
    assert bench.log == ["unmap"]


async def test_a_worker_whose_agent_is_gone_lets_go_of_the_device() -> None:
    def member(actor_id: str) -> Member:
        return Member(actor_id=actor_id, role="kv_agent", epoch=1, endpoint=Endpoint("", ""))

    bench = Bench()
    context = await bench.start()
    bench.actor.on_members([], [member("agent-1")], [])
    assert context.ended == []
    bench.actor.on_members([], [member("agent-0")], [])
    assert context.ended == ["agent-0 is gone, and with it the pages of g on cuda:0"]
    bench.runners[0].gate.set()
    await bench.actor.stop()


async def test_a_pool_on_another_device_than_the_agent_says_is_not_mapped(bench: Bench) -> None:
    with pytest.raises(PoolMismatch, match="has device cuda:0, but agent-0 says cuda:1"):
        await bench.start(msgspec.structs.replace(bench.handle, device="cuda:1"))
    await bench.actor.stop()

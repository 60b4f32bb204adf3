"""Times the bookkeeping of one step: its way through scheduler and worker, page table, prefix cache, its news. No I/O.

Figures are printed with a floor: the codec alone, a copy of the entry's bytes, packing the same tokens.

    python -m benchmarks.cores
"""

import statistics
import time
from array import array
from collections.abc import Callable
from typing import TypeVar

from kvstore.cache.allocator import PageState
from kvstore.cache.events import EventLog
from kvstore.cache.page_table import PageEntry, PageTable
from kvstore.cache.prefix_cache import PrefixCache
from kvstore.hashing import chain_packed, pack_tokens, root_hash
from nodes.protocol import Adopt, StepPlan
from nodes.request import RequestSpec, Sampling, StopRules
from nodes.roles import NODE_CODEC
from nodes.scheduler.batch.batching import compose_step
from nodes.scheduler.batch.step import Step
from nodes.scheduler.batch.step_pace import StepPace
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.sequence import Sequence
from nodes.tokenizer.routing.cache_index import CacheIndex
from nodes.worker.core import AdoptArrived, RunStep, StepArrived, StepDone, WorkerCore
from nodes.worker.steps.columns import Limits
from nodes.worker.steps.step import StepOutcome

_Result = TypeVar("_Result")
PAGE_SIZE = 16
CONTEXT = 1024
PROMPT_TOKENS = 10_000


def micros(action: Callable[[], object], rounds: int = 400, prepare: Callable[[], object] | None = None) -> float:
    """Median CPU time of one call; `prepare` runs before each call and is not counted."""
    times: list[float] = []
    for _ in range(rounds):
        if prepare is not None:
            prepare()
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return statistics.median(times) * 1e6


def decoding(row: int) -> Sequence:
    """A sequence that decodes from position `CONTEXT` on, and has room for all measured steps."""
    one = Sequence(row, range(CONTEXT), CONTEXT - 1, RequestSpec(Sampling(), StopRules(max_tokens=1)), 0.0)
    one.slot, one.request_id = row - 1, f"cmpl-{row:032}-0"
    one.num_computed = one.num_scheduled = CONTEXT - 1
    # In a real batch, sequences do not all fill a page in the same step.
    one.page_ids = array("i", range(1, 1 + (CONTEXT + row % PAGE_SIZE) // PAGE_SIZE))
    one.max_length = 2 * CONTEXT
    return one


class StepPath:
    """Decode steps of `num_rows` sequences, through the scheduler's and the worker's cores, without a model."""

    def __init__(self, num_rows: int) -> None:
        self.config = SchedulerConfig(group="m", worker="w", agent="a", context_length=2 * CONTEXT)
        self.pace = StepPace(self.config.max_step_s, self.config.page_size)
        self.running = [decoding(row) for row in range(1, num_rows + 1)]
        limits = Limits(4 * CONTEXT, PAGE_SIZE, 2 * CONTEXT, 2 * CONTEXT, self.config.step_tokens)
        self.worker = WorkerCore(limits)
        self.worker.handle(AdoptArrived(Adopt(scheduler_epoch=1, next_step=1), None))
        self.last: Step | None = None
        self.times: dict[str, list[float]] = {}
        self.num_body_bytes = 0

    def step(self, number: int) -> None:
        """One step, each part of it timed."""
        for one in self.running:
            if one.num_scheduled >= len(one.page_ids) * PAGE_SIZE:
                one.page_ids.append(len(one.page_ids) + 1)
            one.capacity = len(one.page_ids) * PAGE_SIZE
        last, self.last = self.last, None
        step = self._timed("compose", lambda: compose_step(self.config, 2048, self.pace, self.running, [], 1, last))
        assert step is not None
        self.last = step
        assert len(step.sequences) == len(self.running)
        body, buffers = self._timed("encode", lambda: self._encoded(number, step))
        self.num_body_bytes = len(body)
        plan: StepPlan = self._timed("decode", lambda: NODE_CODEC.decode(body))  # type: ignore[assignment]
        commands = self._timed("check", lambda: self.worker.handle(StepArrived("s", plan, buffers)))
        assert isinstance(commands[0], RunStep)
        outcome = StepOutcome([7] * len(self.running))
        assert self._timed("record", lambda: self.worker.handle(StepDone(outcome, 0.0)))
        for one in self.running:
            one.token_ids.append(7)

    def _encoded(self, number: int, step: Step) -> tuple[bytes, list[memoryview]]:
        plan = StepPlan(scheduler_epoch=1, step=number, opens=step.opens)
        return NODE_CODEC.encode(plan), [memoryview(part).cast("B") for part in step[:1] + step[2:4]]  # type: ignore[arg-type]

    def _timed(self, name: str, action: Callable[[], _Result]) -> _Result:
        start = time.process_time()
        result = action()
        self.times.setdefault(name, []).append(time.process_time() - start)
        return result


def step_path(num_rows: int, rounds: int = 400) -> str:
    """Median and best CPU time of a decode step without the first ones; the median of each part; its body's bytes."""
    path = StepPath(num_rows)
    for number in range(1, rounds + 1):
        path.step(number)
    parts = {name: times[20:] for name, times in path.times.items()}
    median, best = (1e6 * sum(pick(times) for times in parts.values()) for pick in (statistics.median, min))
    told = ", ".join(f"{name} {statistics.median(times) * 1e6:.0f}" for name, times in parts.items())
    return f"{median:4.0f} us, best {best:.0f} ({told}); a body of {path.num_body_bytes} B"


def page_table() -> tuple[float, float, float]:
    """Microseconds to write an entry, to read it, and to copy its bytes once; 1,000 entries are timed at once."""
    memory = memoryview(bytearray(PageTable.num_bytes(1001, PAGE_SIZE)))
    table = PageTable(memory, 1001, PAGE_SIZE)
    entry = PageEntry(PageState.RUNNING, tokens=pack_tokens(list(range(PAGE_SIZE))))
    size = PageTable.num_bytes(1, PAGE_SIZE) // 2
    source = memoryview(bytes(size))

    def write() -> None:
        for page in range(1, 1001):
            table.write(page, entry)

    def read() -> None:
        for page in range(1, 1001):
            table.read(page)

    def copy() -> None:
        for page in range(1, 1001):
            memory[page * size : (page + 1) * size] = source

    return micros(write, 20) / 1000, micros(read, 20) / 1000, micros(copy, 20) / 1000


def prefix_match() -> tuple[float, float]:
    """Microseconds to look up a cached prompt of `PROMPT_TOKENS`, and to pack its token ids alone."""
    cache = PrefixCache(2 + PROMPT_TOKENS // PAGE_SIZE, PAGE_SIZE, group="m", epoch=1)
    prompt = list(range(PROMPT_TOKENS))
    held = cache.start(prompt)
    assert held.reserve(len(prompt))
    held.advance(prompt)
    held.release()
    assert cache.match(prompt).num_tokens >= PROMPT_TOKENS - PAGE_SIZE
    return micros(lambda: cache.match(prompt), 100), micros(lambda: pack_tokens(prompt), 100)


def cache_news(num_pages: int, rounds: int = 400) -> tuple[float, int]:
    """Microseconds until a tokenizer knows of a prompt's pages: logged, encoded, decoded, applied. Bytes of bodies."""
    log, index, tokens = EventLog(list, "decode-0"), CacheIndex(1 << 20), pack_tokens(range(num_pages * PAGE_SIZE))
    roots = [root_hash(str(number)) for number in range(rounds)]
    prompts = iter([(chain_packed(root, tokens, PAGE_SIZE), root) for root in roots])
    bodies: list[bytes] = []

    def follow() -> None:
        log.stored(tokens, *next(prompts), "")
        bodies[:] = [NODE_CODEC.encode(message) for message in iter(log.drain_message, None)]
        for body in bodies:
            index.apply(NODE_CODEC.decode(body).events)

    return micros(follow, rounds), sum(map(len, bodies))


def main() -> None:
    """Prints one line per figure."""
    for num_rows in (1, 64, 256):
        print(f"step of {num_rows:3} decode rows at {CONTEXT}: {step_path(num_rows)}")
    write, read, copy = page_table()
    print(f"page table entry: write {write:.2f} us, read {read:.2f} us; copy of its bytes {copy:.2f} us")
    match, packing = prefix_match()
    print(f"prefix match of {PROMPT_TOKENS} tokens: {match:.0f} us; packing its ids {packing:.0f} us")
    for num_pages in (1, 7, 1000):
        took, size = cache_news(num_pages)
        print(f"cache news of {num_pages} pages: {took:.1f} us; {size} B")


if __name__ == "__main__":
    main()

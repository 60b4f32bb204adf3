"""Times the bookkeeping of one step: plan and frame, page table, prefix cache. One process, no I/O.

Beside each figure the floor of what it does: the codec alone, a copy of the entry's bytes, packing the same tokens.

    python -m benchmarks.cores
"""

import statistics
import time
from array import array
from collections.abc import Callable

import msgspec

from kvstore.allocator import PageState
from kvstore.hashing import pack_tokens
from kvstore.page_table import PageEntry, PageTable
from kvstore.prefix_cache import PrefixCache
from nodes.protocol import StepPlan
from nodes.request import Sampling
from nodes.scheduler.batching import compose_step
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.sequence import Sequence
from nodes.scheduler.step_pace import StepPace

PAGE_SIZE = 16
CONTEXT = 1024
PROMPT_TOKENS = 10_000


def micros(action: Callable[[], object], rounds: int = 400, prepare: Callable[[], object] | None = None) -> float:
    """Median CPU time of one call; `prepare` runs before each and is not counted."""
    times: list[float] = []
    for _ in range(rounds):
        if prepare is not None:
            prepare()
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return statistics.median(times) * 1e6


def decoding(row: int) -> Sequence:
    """A sequence that decodes at position `CONTEXT`."""
    one = Sequence(row, range(CONTEXT), CONTEXT, Sampling(), 0.0)
    one.num_computed = one.num_scheduled = CONTEXT - 1
    one.page_ids = array("i", range(1, 2 + CONTEXT // PAGE_SIZE))
    one.capacity = len(one.page_ids) * PAGE_SIZE
    one.max_length = one.capacity
    return one


def planning(num_rows: int) -> tuple[float, float]:
    """Composing and encoding the plan of a decode step, and encoding alone; microseconds."""
    config = SchedulerConfig(group="m", worker="w", agent="a", context_length=2 * CONTEXT)
    pace = StepPace(config.max_step_s, config.page_size)
    encoder = msgspec.msgpack.Encoder()
    running: list[Sequence] = []

    def renew() -> None:
        running[:] = [decoding(row) for row in range(1, num_rows + 1)]

    def plan() -> bytes:
        step = compose_step(config, config.step_tokens, pace, running, [])
        assert step is not None
        assert len(step.rows) == num_rows
        return encoder.encode(StepPlan(1, 1, step.rows))

    renew()
    step = compose_step(config, config.step_tokens, pace, running, [])
    assert step is not None
    whole = StepPlan(1, 1, step.rows)
    return micros(plan, prepare=renew), micros(lambda: encoder.encode(whole))


def page_table() -> tuple[float, float, float]:
    """Writing an entry, reading it, and copying its bytes once; microseconds, of 1,000 at a time."""
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
    """Looking up a cached prompt of `PROMPT_TOKENS`, and packing its token ids alone; microseconds."""
    cache = PrefixCache.fresh(2 + PROMPT_TOKENS // PAGE_SIZE, PAGE_SIZE, group="m", epoch=1)
    prompt = list(range(PROMPT_TOKENS))
    held = cache.start(prompt)
    assert held.reserve(len(prompt))
    held.advance(prompt)
    held.release()
    assert cache.match(prompt).num_tokens >= PROMPT_TOKENS - PAGE_SIZE
    return micros(lambda: cache.match(prompt), 100), micros(lambda: pack_tokens(prompt), 100)


def main() -> None:
    """Prints one line per figure."""
    for num_rows in (1, 64):
        whole, codec = planning(num_rows)
        print(f"plan of {num_rows:2} decode rows, composed and encoded: {whole:6.1f} us; encoding alone {codec:.1f} us")
    write, read, copy = page_table()
    print(f"page table entry: write {write:.2f} us, read {read:.2f} us; copy of its bytes {copy:.2f} us")
    match, packing = prefix_match()
    print(f"prefix match of {PROMPT_TOKENS} tokens: {match:.0f} us; packing its ids {packing:.0f} us")


if __name__ == "__main__":
    main()

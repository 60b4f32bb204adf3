"""What takes time and leaves traces in memory: steps that write until they end, copies that go on after a cancel.

The echo model writes a step's KV in one moment, and the shared-memory transport stops where it is told to. A GPU and a
network card do neither, and the promises are made for those: pages are written from the first moment of a step to its
last, and a cancelled copy may still write for a while. `corrupt_pages` then compares what the books say with the pages.
"""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

from kvstore.allocator import PageState
from kvstore.hashing import unpack_tokens
from kvstore.page_pool import PagePool
from kvstore.page_table import Torn
from kvstore.transfer.base import Direction
from nodes.kv_agent.actor import KVAgent
from nodes.worker.actor import WorkerActor
from nodes.worker.step import RunnableStep, run_isolated
from tests.simulation.bad_moments import BadMoments


class SlowWorker(WorkerActor):
    """A worker whose steps write every other row when they begin, and all of them when they end.

    `errors` counts the rows that failed, by code; `moments` says which steps take much longer than others.
    """

    errors: Counter[str]
    moments: BadMoments

    def _run(self, step: RunnableStep) -> None:
        runner: Any = self._require_runner()
        some = run_isolated(runner, step._replace(rows=step.rows[step.step % 2 :: 2]))
        self.errors.update(error.code for error in some.errors)
        num_tokens = sum(row.num_tokens for row in step.rows)
        timings = runner._timings
        delay_s = timings.step_ms * 1e-3 + timings.token_us * 1e-6 * num_tokens
        delay_s += self.moments.stall_s(self._config.group, step)
        self.ctx.later(delay_s, self._end, step, self.ctx.now())

    def _end(self, step: RunnableStep, started: float) -> None:
        outcome = run_isolated(self._require_runner(), step)
        self.errors.update(error.code for error in outcome.errors)
        self._done(step, outcome, started)


def slow_down(agent: KVAgent, copy_s: float, most_late: int, moments: BadMoments, dice: random.Random) -> None:
    """Have each quantum of a copy take `copy_s`, and let a cancelled copy write on for up to `most_late` of them."""
    later = agent.ctx.later
    transport: Any
    [transport] = agent._puller.transports
    cancel, post = transport.cancel, transport.post

    def posted(direction: Direction, region: int, *more: Any) -> int:
        moments.on_copy(transport._regions[region].info.group, copy_s)
        return post(direction, region, *more)

    agent.ctx.later = lambda delay_s, *callback: later(delay_s or copy_s, *callback)  # type: ignore[method-assign]
    transport.cancel = lambda handle: later(dice.random() * most_late * copy_s, cancel, handle)
    transport.post = posted


def corrupt_pages(pool: PagePool) -> Iterator[str]:
    """Pages of an echo pool that the table says are cached, and that hold something else."""
    words = memoryview(pool.pages_view).cast("B").cast("I")
    page_size, page_words = pool.layout.page_size, pool.layout.page_bytes // 4
    for page, entry in pool.table().scan():
        if isinstance(entry, Torn) or entry.state is not PageState.CACHED:
            continue
        start = page * page_words
        tokens = words[start : start + page_size].tolist()
        positions = words[start + page_size : start + 2 * page_size].tolist()
        first = positions[0]
        is_in_place = first % page_size == 0 and entry.is_first == (first == 0)
        if tokens != list(unpack_tokens(entry.tokens)) or positions != list(range(first, first + page_size)):
            yield f"page {page} of {pool.info.group} holds {tokens} at {positions}, the table says {entry}"
        elif not is_in_place:
            yield f"page {page} of {pool.info.group} begins at position {first}, the table says {entry}"

"""Hardware that is slow and leaves traces in memory: steps that write until they end, copies that go on after a cancel.

The echo model writes a step's KV in one moment, and the shared-memory transport stops where it is told to. A GPU and a
network card do neither, and the promises are made for those: pages are written from the first moment of a step to its
last, and a cancelled copy may write for a while longer. `corrupt_pages` then compares the page table with the pages.
"""

import random
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace
from typing_extensions import override

from kvstore.cache.allocator import PageState
from kvstore.cache.page_table import PageTable, Torn
from kvstore.hashing import unpack_tokens
from kvstore.pool.page_pool import PagePool
from kvstore.transfer.base import Transfer
from nodes.kv_agent.actor import KVAgent
from nodes.protocol import RowError
from nodes.protocol.steps import Open
from nodes.worker.actor import WorkerActor
from nodes.worker.config import WorkerConfig
from nodes.worker.errors import DeviceFailed
from nodes.worker.executor.isolation import run_isolated
from nodes.worker.steps.sequence_table import OpenSequence
from nodes.worker.steps.step import RunnableStep, outcome_of, with_inputs
from tests.simulation.bad_devices import BadDevices, BadRunner
from tests.simulation.bad_moments import BadMoments

WAIT_S = 0.002


class Lockstep:
    """What collective operations do to ranks: a step ends at no rank before it has begun at all of them.

    `begun` has the steps that each rank has begun, by group and the epoch that names it. Ranks whose steps do not pair
    up would sum what does not belong together.
    """

    def __init__(self) -> None:
        self.begun: dict[tuple[str, int], list[list[tuple[int, int]]]] = {}

    def begin(self, config: WorkerConfig, group_epoch: int, step: tuple[int, int]) -> tuple[int, int, str]:
        """A rank begins a step (scheduler epoch and number). Returns which step of its life it is, and the group."""
        ranks = self.begun.setdefault((config.group, group_epoch), [[] for _ in range(config.tp_size)])
        ranks[config.tp_rank].append(step)
        return len(ranks[config.tp_rank]), group_epoch, config.group

    def is_met(self, at: tuple[int, int, str]) -> bool:
        """Whether all ranks have begun it."""
        number, group_epoch, group = at
        return all(len(steps) >= number for steps in self.begun[group, group_epoch])

    def problems(self) -> list[str]:
        """Groups whose ranks have begun different steps."""
        return [
            f"ranks of {group} of epoch {epoch} began {list(one)} at once"
            for (group, epoch), ranks in self.begun.items()
            for one in zip(*ranks, strict=False)
            if len(set(one)) > 1
        ]


def extra_of(position: int, token_id: int) -> bytes:
    """What goes with an output token in meshes whose workers send more than tokens."""
    return f"{token_id} at {position}".encode()


class SlowWorker(WorkerActor):
    """A worker whose steps write every other row when they begin, and all of them when they end.

    `errors` counts the rows that failed, by code; `moments` says which steps take much longer than others. Ranks of a
    group wait for each other in every step. With a `depth` of two the next step waits behind the one that runs, and
    takes from it what the scheduler did not know. With `says_more` it sends something extra with each token. Asks that
    are `unknown` it does not announce, as a worker of an older release.
    """

    depth = 1
    says_more = False
    unknown: frozenset[str] = frozenset()
    errors: Counter[str]
    moments: BadMoments
    devices: BadDevices
    lockstep: Lockstep
    _fate = ""
    _begun: deque[RunnableStep]

    @property
    def _depth(self) -> int:
        self._begun = deque()
        return self.depth

    @override
    async def start(self) -> None:
        await super().start()
        core, unknown = self._core, self.unknown
        if not unknown or core is None:
            return
        core.adopted = replace(core.adopted, asks=[ask for ask in core.adopted.asks if ask not in unknown])
        table = core._table
        opened = table._opened

        def opened_here(opening: Open) -> OpenSequence:
            sampling = opening.sampling
            asks = [replace(ask, name=f"{ask.name}?") if ask.name in unknown else ask for ask in sampling.asks]
            return opened(replace(opening, sampling=replace(sampling, asks=asks)))

        table._opened = opened_here  # type: ignore[method-assign]

    def _run(self, step: RunnableStep) -> None:
        self._watch.begun(step)
        self._begun.append(step)
        if len(self._begun) == 1:
            self._begin(step, [])

    def _begin(self, step: RunnableStep, errors: list[RowError]) -> None:
        """Rows with `errors` are left out of the step."""
        runner: Any = self._engine.require()
        some = run_isolated(runner, step._replace(rows=step.rows[step.step % 2 :: 2]))
        self.errors.update(error.code for error in some.errors)
        if self._fate != "broken" and self._config.tp_size == 1:
            self._fate = self.devices.strike()
        if self._fate == "stuck":
            return
        num_tokens = sum(row.num_tokens for row in step.rows)
        timings = runner._timings
        delay_s = timings.step_ms * 1e-3 + timings.token_us * 1e-6 * num_tokens
        delay_s += self.moments.stall_s(self._config.group, step)
        at = None
        if self._ranks is not None and self._core is not None:
            running = (self._core.scheduler_epoch, step.step)
            at = self.lockstep.begin(self._config, self._ranks.epoch, running)
        self.ctx.later(delay_s, self._end, step, errors, self.ctx.now(), at)

    def _end(
        self, step: RunnableStep, missing: list[RowError], started: float, at: tuple[int, int, str] | None
    ) -> None:
        if at is not None and not self.lockstep.is_met(at):
            self.ctx.later(WAIT_S, self._end, step, missing, started, at)
            return
        try:
            outcome = run_isolated(BadRunner(self._engine.require(), self._fate), step)
        except DeviceFailed as error:
            self._die_of(step, error)
            return
        self.errors.update(error.code for error in outcome.errors)
        whole = self._begun.popleft()
        outcome = outcome_of(whole, step, outcome, missing)
        if self.says_more:
            drew = zip(whole.rows, outcome.token_ids, outcome.extras or [b""] * len(whole.rows), strict=True)
            extras = [read + extra_of(row.output_position, token) if token >= 0 else b"" for row, token, read in drew]
            outcome = outcome._replace(extras=extras)
        drawn = {row.row: token_id for row, token_id in zip(whole.rows, outcome.token_ids, strict=True)}
        behind = self._begun[0] if self._begun else None
        self._done(whole, outcome, started)
        if behind is not None:
            self._begin(*with_inputs(behind, drawn))


def slow_down(agent: KVAgent, copy_s: float, most_late: int, moments: BadMoments, dice: random.Random) -> None:
    """Have each quantum of a copy take `copy_s`, and let a cancelled copy go on for up to `most_late` quanta."""
    later = agent.ctx.later
    agent.ctx.later = lambda delay_s, *callback: later(delay_s or copy_s, *callback)  # type: ignore[method-assign]

    def slow(transport: Any) -> None:
        cancel, post = transport.cancel, transport.post

        def posted(transfer: Transfer) -> None:
            moments.on_copy(transfer.pool.info.group, copy_s)
            post(transfer)

        transport.cancel = lambda transfer: later(dice.random() * most_late * copy_s, cancel, transfer)
        transport.post = posted

    for transport in agent.transports.transports:
        slow(transport)


def corrupt_pages(pool: PagePool, table: PageTable) -> Iterator[str]:
    """Pages of an echo pool that its group's table says are cached, but that hold something else."""
    words = memoryview(pool.pages_view).cast("B").cast("I")
    page_size, page_words = pool.layout.page_size, pool.layout.page_bytes // 4
    for page, entry in table.scan():
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

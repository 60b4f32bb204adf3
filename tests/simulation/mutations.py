"""One planted bug per promise of the cores. What the simulation does not see, it does not guard.

A mutation replaces one method; `PLANTED[name]` makes the patch. `first_caught(name)` runs seeds until one fails.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import _patch, patch  # type: ignore[attr-defined]

import msgspec

from kvstore.radix_tree import RadixTree
from kvstore.rebuild import Orphans
from kvstore.sequence_pages import SequencePages
from kvstore.transfer import puller
from nodes.gateway.cancels import CancelLedger
from nodes.gateway.core import GatewayCore
from nodes.gateway.requests import RequestLog
from nodes.kv_agent.core import AgentCore
from nodes.scheduler.attempts import Attempts
from nodes.scheduler.orders import Orders
from nodes.scheduler.pipeline import Pipeline
from nodes.scheduler.running import Running
from nodes.scheduler.sequence import Sequence
from nodes.scheduler.streams import Streams
from nodes.worker.core import WorkerCore
from tests.simulation.scenario import run_seed

MOST_SEEDS = 500


def _nothing(*arguments: Any, **options: Any) -> None:
    return None


def _around(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> Callable[[], "_patch[Any]"]:
    """Replace `owner.name` by what `make` makes of it."""
    return lambda: patch.object(owner, name, make(getattr(owner, name)))


def _leave_at_once(leave: Any) -> Any:
    def mutated(self: Running, sequence: Sequence, stage: Any) -> bool:
        inflight, sequence.num_inflight = sequence.num_inflight, 0
        left = leave(self, sequence, stage)
        sequence.num_inflight = inflight
        return left

    return mutated


def _journal_what_is_scheduled(journal: Any) -> Any:
    def mutated(self: Sequence, page_size: int) -> None:
        computed, self.num_computed = self.num_computed, self.num_scheduled
        journal(self, page_size)
        self.num_computed = computed

    return mutated


def _count_tokens_twice(accept: Any) -> Any:
    def mutated(self: RequestLog, delta: Any, now: float) -> Any:
        taken = msgspec.structs.replace(delta, position=len(self.output_ids), text_offset=self.num_chars)
        return accept(self, taken, now)

    return mutated


def _take_older_attempts(on_delta: Any) -> Any:
    def mutated(self: GatewayCore, delta: Any, now: float) -> None:
        log = self._requests.get(delta.request_id)
        on_delta(self, delta if log is None else msgspec.structs.replace(delta, attempt=log.attempt), now)

    return mutated


def _take_steps_of_every_epoch(on_step: Any) -> Any:
    def mutated(self: WorkerCore, event: Any) -> Any:
        plan = msgspec.structs.replace(event.plan, scheduler_epoch=self._epoch)
        return on_step(self, event._replace(plan=plan))

    return mutated


def _take_any_result(on_result: Any) -> Any:
    def mutated(self: Pipeline, worker: Any, result: Any, now: float) -> Any:
        if self._sent:
            step = self._sent[0].plan.step
            result = msgspec.structs.replace(result, scheduler_epoch=self._epoch, step=step)
        return on_result(self, worker, result, now)

    return mutated


def _free_at_once(take_back: Any) -> Any:
    return lambda self, *, quiesced: take_back(self, quiesced=True)


def _off_by_one(reopen: Any) -> Any:
    return lambda self, sequence, position, *more: reopen(self, sequence, position + 1, *more)


def _unlocked(lock: Any) -> Any:
    def mutated(self: RadixTree, match: Any) -> Any:
        node = step = lock(self, match)
        while step is not None:
            if step.lock_count == 1:
                self._num_evictable += len(step.pages)
            step.lock_count -= 1
            step = step.parent
        return node

    return mutated


PLANTED: dict[str, Callable[[], "_patch[Any]"]] = {
    "unacknowledged steps are not sent again": _around(Pipeline, "send_again", lambda _: _nothing),
    "any result is taken for the oldest step": _around(Pipeline, "on_result", _take_any_result),
    "a worker runs steps of every scheduler epoch": _around(WorkerCore, "_on_step", _take_steps_of_every_epoch),
    "pages are given back under a step that writes them": _around(Running, "leave", _leave_at_once),
    "pages are journalled before the step is acknowledged": _around(Sequence, "journal", _journal_what_is_scheduled),
    "locked pages are evicted": _around(RadixTree, "lock", _unlocked),
    "generations are not compared": _around(puller, "_compare", lambda _: _nothing),
    "pages of a failed transfer are free at once": _around(SequencePages, "take_back", _free_at_once),
    "a dead scheduler's grants stay open": _around(AgentCore, "_revoke_older", lambda _: lambda *_: []),
    "what nobody claims is held for good": _around(Orphans, "release", lambda _: _nothing),
    "deltas are taken wherever they belong": _around(RequestLog, "accept", _count_tokens_twice),
    "output of older attempts is taken": _around(GatewayCore, "_on_delta", _take_older_attempts),
    "a cancel is asked once": _around(
        CancelLedger, "failed", lambda _: lambda self, scheduler, now: self.lost(scheduler)
    ),
    "attempts of a lost gateway go on": _around(Attempts, "of_gateway", lambda _: lambda *_: []),
    "prefilled pages are kept for good": _around(Orders, "on_lease_over", lambda _: _nothing),
    "a stream begins behind the position asked for": _around(Streams, "reopen", _off_by_one),
}


def first_caught(name: str, first: int = 0, most: int = MOST_SEEDS) -> tuple[int, str] | None:
    """The first seed that fails with this bug, and how; None if none does."""
    for seed in range(first, first + most):
        with PLANTED[name]():
            try:
                run_seed(seed)
            except Exception as error:  # noqa: BLE001 - whatever it is: it is seen
                return seed, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None

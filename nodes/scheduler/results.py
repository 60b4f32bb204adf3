"""What a step's result does: progress of each row, tokens to their streams, sequences that end, pages that come back.

Called once per step for every row, so it is written for speed. Pure; owned by the core.
"""

from nodes.protocol import RowError
from nodes.scheduler.endings import Endings
from nodes.scheduler.orders import Orders
from nodes.scheduler.pipeline import Acknowledged
from nodes.scheduler.running import Running
from nodes.scheduler.sequence import Sequence, Stage
from nodes.scheduler.streams import Streams

POISONED = "poisoned_request"


class Results:
    """Applies acknowledged steps."""

    def __init__(self, page_size: int, running: Running, orders: Orders, streams: Streams, endings: Endings) -> None:
        self._page_size = page_size
        self._running = running
        self._orders = orders
        self._streams = streams
        self._endings = endings
        self.num_output_tokens = 0
        self.num_computed_tokens = 0

    def acknowledge(self, step: Acknowledged, now: float) -> bool:
        """Take in one step. True if more may be admitted now than before."""
        has_room = False
        errors = step.errors
        for index, (row, sequence) in enumerate(zip(step.rows, step.sequences, strict=True)):
            sequence.num_inflight -= 1
            if index in errors:
                self._on_error(sequence, errors[index], now)
                has_room = True
            else:
                end = row.start + row.num_tokens
                self.num_computed_tokens += row.num_tokens
                sequence.num_computed = end
                if end >= sequence.journal_at:
                    sequence.journal(self._page_size)
                    has_room = True
                if sequence.order_id and sequence.stage is not Stage.ENDED:
                    self._orders.on_computed(sequence, now)
                if row.sampling is not None and sequence.stage is not Stage.ENDED:
                    self.draw(sequence, step.token_ids[index], now)
            if not sequence.num_inflight and sequence.stage >= Stage.PREEMPTED:
                has_room = True
                self._settle(sequence)
        return has_room

    def draw(self, sequence: Sequence, token_id: int, now: float) -> None:
        """A token was drawn for `sequence`, here or by the scheduler that prefilled it."""
        self.num_output_tokens += 1
        if sequence.order_id:
            self._running.retain(sequence)
            self._orders.on_token(sequence, token_id, now)
            return
        reason = sequence.append(token_id)
        if reason:
            self._endings.finish(sequence, reason, now)
        else:
            self._streams.token(sequence, token_id)

    def _settle(self, sequence: Sequence) -> None:
        if sequence.stage is Stage.RETAINED:
            return
        self._running.settle(sequence)
        if sequence.stage is Stage.PREEMPTED:
            self._endings.put_back(sequence)

    def _on_error(self, sequence: Sequence, error: RowError, now: float) -> None:
        """A row that could not be computed ends its sequence, and nothing else."""
        if sequence.stage is Stage.ENDED:
            return
        if sequence.order_id:
            if (held := self._orders.fail(sequence.order_id, error.code, error.message, now)) is not None:
                self._endings.leave(held, now)
        else:
            self._endings.fail(sequence, error.code, error.message, error.code != POISONED, now)

"""Every way in which a sequence ends, whatever its stage.

    finish   it ends by its own rules; tokens, or its vector, are kept until the gateway has them
    stop     a detokenizer found a stop string; the same, but the detokenizer reports the finish
    cancel   nobody wants it; nothing more is sent
    fail     it cannot go on; the gateway is told. All fail at once if, for example, the group's memory is released

Pure; used by the core and its results.
"""

from nodes.protocol import AttemptFailed
from nodes.scheduler.books import Books
from nodes.scheduler.finish.streams import Streams
from nodes.scheduler.handoff.prefill import PrefillHandoffQueue
from nodes.scheduler.sequence import Sequence, Stage


class Endings:
    """Ends sequences, and tells those whose they are."""

    def __init__(self, books: Books, orders: PrefillHandoffQueue, streams: Streams) -> None:
        self._books = books
        self._orders = orders
        self._streams = streams
        self.num_finished = 0
        self.num_cancelled = 0
        self.num_failed = 0

    def finish(self, sequence: Sequence, reason: str, now: float) -> None:
        sequence.finish_reason = reason
        self._streams.send(sequence)
        self._keep(sequence, now)

    def finish_vector(self, sequence: Sequence, vector: bytes, now: float) -> None:
        # vLLM's reason, too, for what ends without a limit; a gateway that asks again
        # is told by it that there is an end.
        sequence.vector, sequence.finish_reason = vector, "stop"
        self._streams.tell_vector(sequence)
        self._keep(sequence, now)

    def stop(self, sequence: Sequence, now: float) -> None:
        """A stop string ended it; nothing happens if it has ended already."""
        if sequence.stage is not Stage.ENDED:
            self._keep(sequence, now)

    def cancel(self, sequence: Sequence, now: float) -> None:
        self._streams.close(sequence)
        if sequence.stage is not Stage.ENDED:
            self.num_cancelled += 1
            self._books.leave(sequence, now)
        self._books.attempts.forget(sequence)

    def fail(self, sequence: Sequence, code: str, message: str, retryable: bool, now: float) -> None:
        self.num_failed += 1
        self._books.outbox.tell(
            sequence.gateway.actor_id,
            AttemptFailed(
                request_id=sequence.request_id,
                attempt=sequence.attempt,
                code=code,
                message=message,
                retryable=retryable,
            ),
        )
        self._streams.close(sequence)
        self._books.leave(sequence, now)
        self._books.attempts.forget(sequence)

    def abort_all(self, code: str, message: str, now: float, *, keep_handoffs: bool = False) -> None:
        """So that all start elsewhere at once. `keep_handoffs`: not those prefilled elsewhere, which need no worker."""
        for sequence in self._books.attempts:
            if sequence.stage is not Stage.ENDED and not (keep_handoffs and sequence.stage is Stage.HANDOFF):
                self.fail(sequence, code, message, True, now)
        for grant_id in self._orders.running():
            self._orders.fail(grant_id, code, message, now)

    def end_badly(self, sequence: Sequence, code: str, message: str, retryable: bool, now: float) -> None:
        """As `fail`, also for a prefill that another scheduler ordered, which is told of it."""
        if sequence.order_id:
            self._orders.fail(sequence.order_id, code, message, now)
        else:
            self.fail(sequence, code, message, retryable, now)

    def _keep(self, sequence: Sequence, now: float) -> None:
        self.num_finished += 1
        self._books.leave(sequence, now)
        for excess in self._books.attempts.finish(sequence, now):
            self._books.attempts.forget(excess)

"""Every way in which a sequence ends, whatever its stage; and its return to the queue.

    finish   it ends by its own rules; tokens, or its vector, are kept until the gateway has them
    stop     a detokenizer found a stop string; the same, but the detokenizer reports the finish
    cancel   nobody wants it; nothing more is sent
    fail     it cannot go on; the gateway is told. All fail at once if, for example, the group's memory is released

Pure; used by the core and its results.
"""

from nodes.protocol import AttemptFailed
from nodes.scheduler.attempts import Attempts
from nodes.scheduler.batch.running import Running
from nodes.scheduler.events import Outbox
from nodes.scheduler.finish.streams import Streams
from nodes.scheduler.handoff.decode import DecodeHandoffQueue
from nodes.scheduler.handoff.prefill import PrefillHandoffQueue
from nodes.scheduler.handoff.restore import RestoreQueue
from nodes.scheduler.queue.policy import WaitingQueue
from nodes.scheduler.sequence import Sequence, Stage
from nodes.trace_notes import Noted


class Endings:
    """Takes sequences out of the parts that hold them."""

    def __init__(
        self,
        queue: WaitingQueue,
        running: Running,
        grants: DecodeHandoffQueue,
        restores: RestoreQueue,
        attempts: Attempts,
        streams: Streams,
        outbox: Outbox,
    ) -> None:
        self._queue = queue
        self._running = running
        self._grants = grants
        self._restores = restores
        self._attempts = attempts
        self._streams = streams
        self._outbox = outbox
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
            self.leave(sequence, now)
        self._attempts.forget(sequence)

    def fail(self, sequence: Sequence, code: str, message: str, retryable: bool, now: float) -> None:
        self.num_failed += 1
        self._outbox.tell(
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
        self.leave(sequence, now)
        self._attempts.forget(sequence)

    def abort_all(
        self, orders: PrefillHandoffQueue, code: str, message: str, now: float, *, keep_handoffs: bool = False
    ) -> None:
        """So that all start elsewhere at once. `keep_handoffs`: not those prefilled elsewhere, which need no worker."""
        for sequence in self._attempts:
            if sequence.stage is not Stage.ENDED and not (keep_handoffs and sequence.stage is Stage.HANDOFF):
                self.fail(sequence, code, message, True, now)
        for grant_id in orders.running():
            self.fail_order(orders, grant_id, code, message, now)

    def fail_order(self, orders: PrefillHandoffQueue, grant_id: str, code: str, message: str, now: float) -> None:
        sequence = orders.fail(grant_id, code, message, now)
        assert sequence is not None, "an order that is being computed has a sequence"
        self.leave(sequence, now)

    def leave(self, sequence: Sequence, now: float) -> None:
        """Give back all that it holds; pages that a step or a transfer may still write follow once that has ended."""
        self._outbox.note(Noted.LEFT, sequence.request_id, sequence.num_tokens, 0)
        if sequence.stage is Stage.HANDOFF:
            self._grants.revoke(sequence, now)
        elif sequence.stage is Stage.RESTORE:
            self._restores.revoke(sequence, now)
        self._queue.remove(sequence)
        self._queue.shares.release(sequence)
        self._running.leave(sequence, Stage.ENDED)

    def give_up_restore(self, sequence: Sequence, now: float) -> None:
        """Its pages are needed by one that runs."""
        self._restores.revoke(sequence, now)
        self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Have it wait again, ahead of all of its client's that were never admitted."""
        self._outbox.note(Noted.PUT_BACK, sequence.request_id, sequence.num_tokens, 0)
        sequence.stage = Stage.WAITING
        self._queue.put_back(sequence)

    def _keep(self, sequence: Sequence, now: float) -> None:
        self.num_finished += 1
        self.leave(sequence, now)
        for excess in self._attempts.finish(sequence, now):
            self._attempts.forget(excess)

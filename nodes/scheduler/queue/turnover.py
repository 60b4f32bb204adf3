"""Who makes room for a client of which nothing runs: order alone would have it wait until a sequence of another ends.

    next in order is of a client that has waited `WAIT_S` with nothing running, and has been served no more than others
        -> the youngest sequence of the most served client that runs goes back to its own client's place

Its tokens stay, and so do its pages, cached as long as nobody needs them: it computes a page or so again. Where nothing
is left in the cache it would compute all of it again, each time: whoever goes back a second time has had time to draw
tokens for what it computed. Pure; owned by the core.
"""

from collections.abc import Callable
from typing import Final

from nodes.scheduler.books import Books
from nodes.scheduler.sequence import Sequence, Stage

LOOK: Final = "turnover"
WAIT_S: Final = 0.5
"""Long beside a step (10 to 100 ms), after some of which a place comes free by itself; short for who waits for text."""
AGAIN_S: Final = 1.0
"""At least so long a sequence runs, or waits its turn, between two times that it makes room."""
LOOK_S: Final = 0.05
"""Looking takes some 100 us with 256 that run: not at every step."""
TOKENS_FOR_ONE: Final = 16
"""A step that draws one token takes as long as computing some 16 more of a prompt: then half of the time is lost at
most."""


class Turnover:
    """Finds the sequence that makes room. `waits_for_prefix`: a waiting one waits for that, and not for room."""

    def __init__(self, books: Books, waits_for_prefix: Callable[[Sequence, float], bool]) -> None:
        self._books = books
        self._waits_for_prefix = waits_for_prefix
        self._looks_at = 0.0
        self._last: Sequence | None = None
        self.num_put_back = 0

    def find(self, now: float) -> Sequence | None:
        """The sequence, in steps or in a handoff, that makes room now; it counts as going. None: nobody does.

        Called while some wait, when admission has let in whom it could.
        """
        queue, shares = self._books.queue, self._books.queue.shares
        # The last one's pages may still be written: until then nobody else has been let in for it.
        is_going = self._last is not None and self._last.stage is Stage.PREEMPTED
        if shares.num_active < 2 or now < self._looks_at or is_going:
            return None
        self._looks_at = now + LOOK_S
        there = [(sequence.share, sequence) for sequence in (*self._books.running, *self._books.lent(Stage.HANDOFF))]
        for share, _ in there:
            if share is not None:
                share.ran_at = now
        late = now - WAIT_S
        if all(max(one.ran_at, queue.waits_since(one)) > late for one in queue.waiting_clients()):
            return None
        shares.refresh()
        head = next(iter(queue.order(now)))
        waits = head.share
        assert waits is not None, "what waits is held"
        if max(waits.ran_at, queue.waits_since(waits)) > late or self._waits_for_prefix(head, now):
            return None
        able = [
            (share.served, sequence.arrived_at, sequence.row_id, sequence)
            for share, sequence in there
            if share is not None
            and share is not waits
            and share.served >= waits.served
            and sequence.spec.priority >= head.spec.priority
            and can_make_room(sequence, now)
        ]
        if not able:
            return None
        victim = self._last = max(able)[-1]
        victim.put_back_at = now
        waits.is_owed = True
        self.num_put_back += 1
        return victim


def can_make_room(sequence: Sequence, now: float) -> bool:
    """Whether it loses little enough. Not what another scheduler ordered: an agent may be copying its pages."""
    is_due = now - sequence.put_back_at >= AGAIN_S and sequence.num_tokens >= sequence.keeps_until
    return is_due and not sequence.order_id


def entered(sequence: Sequence, num_computed: int) -> None:
    """It goes into steps, with so much of it cached: after it made room once, it stays for what it computes now."""
    if sequence.has_made_room:
        sequence.keeps_until = sequence.num_tokens + 1 + (sequence.num_tokens - num_computed) // TOKENS_FOR_ONE

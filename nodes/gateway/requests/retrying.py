"""What `core.py` bases retries on: error codes that say where an attempt is, and pauses."""

from typing import Final

from mesh.errors import NOT_SERVED
from nodes.protocol.attempts import OVER_SHARE, UNSUPPORTED_ASK

DRAINING: Final = "draining"
NOT_HELD: Final = frozenset(
    {"unreachable", "mailbox_full", "overloaded", OVER_SHARE, DRAINING, "not_ready", NOT_SERVED, UNSUPPORTED_ASK}
)
"""Codes after which the scheduler certainly does not hold the attempt, so its number can be used again."""

ATTEMPT_PAUSES_S: Final = (0.0, 0.0, 0.2, 0.5, 1.0)
"""Pause before try k since something last worked. The first is immediate: most often a single peer has died."""

ELSEWHERE_S: Final = 2.0
"""Time left to an attempt that waited in vain for a drained worker: another group takes it now, or none does."""

WORD_OF_DEATH_S: Final = 0.25
"""Within this time another host's supervisor reports a lost scheduler as dead. If none does, the host is lost."""

FIRST_ROUTE_PAUSE_S: Final = 0.05
"""A scheduler is forked again in 20 to 30 ms, so the second try often finds it. Doubled each time."""
MAX_ROUTE_PAUSE_S: Final = 1.0
"""2,048 waiting requests ask tokenizers 2,048 times a second at most; a route that exists again is found in 1 s."""
GAP_PAUSE_S: Final = 0.2
"""Before missing output is asked for again, doubled each time: what was asked for takes two hops to come."""
MAX_RESEND_PAUSE_S: Final = 5.0
"""Half of a finished attempt's lease at its scheduler (`lease_s`, 10 s), so that two asks come in time."""
MAX_QUIET_S: Final = 4.0
"""Less than that half, so that the lost end of a slow stream is asked for while its scheduler still has it."""
QUIET_PACES: Final = 4.0
"""Silence counts only if it is longer than `quiet_s` and than this many of the request's usual gaps."""

RESENDS_BEFORE_OTHER_DETOKENIZER: Final = 3


def pause_before(num_tries: int, num_failures: int) -> float:
    """Seconds to wait before the next try: `num_tries` since a scheduler took one, `num_failures` since output came."""
    # A `Retrier` repeats one ask unchanged. A try here differs from the one before: it has another number, more output
    # in its prompt and most often another scheduler, so the request keeps its own pauses.
    return ATTEMPT_PAUSES_S[min(max(num_tries, num_failures), len(ATTEMPT_PAUSES_S) - 1)]

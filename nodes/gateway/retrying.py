"""What `core.py` goes by when it tries again: codes that say where an attempt is, and pauses."""

from typing import Final

from mesh.errors import NOT_SERVED

DRAINING: Final = "draining"
NOT_HELD: Final = frozenset({"unreachable", "mailbox_full", "overloaded", DRAINING, "not_ready", NOT_SERVED})
"""Codes after which the scheduler certainly does not hold the attempt, so its number can be used again."""

ATTEMPT_PAUSES_S: Final = (0.0, 0.0, 0.2, 0.5, 1.0)
"""Before try k since something worked. The first is immediate: its cause is most often one death."""

ELSEWHERE_S: Final = 2.0
"""For an attempt that has waited in vain for a worker that was drained: another group takes it now, or none does."""

WORD_OF_DEATH_S: Final = 0.25
"""Within which another host's supervisor says that a lost scheduler is dead. Where nobody does, the host is lost."""

FIRST_ROUTE_PAUSE_S: Final = 0.05
MAX_ROUTE_PAUSE_S: Final = 1.0
MAX_RESEND_PAUSE_S: Final = 5.0
MAX_QUIET_S: Final = 4.0
QUIET_PACES: Final = 4.0
"""Silence is news only where it is longer than `quiet_s` and than so many of the request's usual gaps."""

RESENDS_BEFORE_OTHER_DETOKENIZER: Final = 3


def pause_before(num_tries: int, num_failures: int) -> float:
    """Seconds to wait before the next try, after so many since one was taken by a scheduler or came to nothing."""
    # A try is no repeat of the one before, as a `Retrier` makes them: it has another number, more output in its prompt
    # and most often another scheduler, so the request itself keeps its pauses.
    return ATTEMPT_PAUSES_S[min(max(num_tries, num_failures), len(ATTEMPT_PAUSES_S) - 1)]

"""What an actor's ends cost it, and how long it then waits for its next start. Pure.

    how it ended                                    costs                       waits
    ---------------------------------------------   -------------------------   -----------------------------------
    foreign: somebody else killed it                nothing                     not at all
    by itself, after it had served well             nothing, forgives pauses    not at all
    by itself, before that                          one of its budget           0, then `backoff_s`, doubled each time
    the same, with nothing left of the budget       it is given up              `budget_window_s`

Served well has who was ready for twice as long as its start took: it is there most of the time, so a pause would only
take from that. Less than silence takes to be noticed does not count, or an actor that crashes as soon as it is forked
would have served well each time and be forked for ever.

Where nobody stands in for it, an actor that was ready does not wait, one whose start fails waits `lone_backoff_s` at
most (at once it would fail again at once, and have spent its budget in a moment), and one that is given up is tried
again after `max_backoff_s`: nothing is spared by a mesh that does not serve.
"""

from collections import deque

from mesh.supervision.events import Policy

_WELL_IN_STARTS = 2.0


class Restarts:
    """The account of one actor. `failures`: ends of its own doing since it last served well."""

    def __init__(self, policy: Policy) -> None:
        self.failures = 0
        self.is_spent = False
        self._policy = policy
        self._charged: deque[float] = deque()
        self._is_free = True
        self._was_ready = False

    def forgive(self) -> None:
        """Its end was wished for, or it shall be tried again whatever it did."""
        self.failures = 0
        self.is_spent = False
        self._charged.clear()

    def ended(self, now: float, *, foreign: bool, start_s: float, ready_s: float | None) -> None:
        """An incarnation ended that took `start_s` to be ready, and was that for `ready_s`; None: it never was."""
        policy = self._policy
        silence_s = policy.missed * policy.heartbeat_s
        is_well = ready_s is not None and ready_s >= max(_WELL_IN_STARTS * start_s, silence_s)
        if is_well:
            self.failures = 0
        self._was_ready = ready_s is not None
        self._is_free = is_well or foreign
        self.is_spent = False
        if self._is_free:
            return
        self.failures += 1
        while self._charged and self._charged[0] <= now - policy.budget_window_s:
            self._charged.popleft()
        self.is_spent = len(self._charged) >= policy.budget
        if not self.is_spent:
            self._charged.append(now)

    def wait_s(self, *, is_last: bool) -> float:
        """From the last end to the next start; `is_last`: nobody else of its kind is ready."""
        policy = self._policy
        if self.is_spent:
            return min(policy.max_backoff_s, policy.budget_window_s) if is_last else policy.budget_window_s
        if self._is_free or self.failures <= 1 or (is_last and self._was_ready):
            return 0.0
        # Past 32 doublings it is the longest pause anyway, and floats end somewhere.
        pause_s = min(policy.backoff_s * 2 ** min(self.failures - 2, 32), policy.max_backoff_s)
        return min(pause_s, policy.lone_backoff_s) if is_last else pause_s

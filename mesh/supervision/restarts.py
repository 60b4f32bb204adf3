"""What each death costs an actor, and how long it then waits for its next start. Pure.

    how it ended                                    costs                       waits
    ---------------------------------------------   -------------------------   -----------------------------------
    foreign: killed by somebody else                nothing                     not at all
    by itself, after it had served well             nothing, resets backoff     not at all
    by itself, before that                          one unit of its budget      0, then `backoff_s`, doubled each time
    the same, with its budget spent                 it is given up              `budget_window_s`

An actor has served well if it was ready for twice as long as its start took: it is up most of the time, and a pause
would only reduce that. A time shorter than silence takes to be noticed does not count, or an actor that crashes as soon
as it is forked would have served well each time and be forked for ever.

If no other actor stands in for it, an actor that was ready does not wait, and one whose start fails waits at most
`lone_backoff_s` (restarted at once it would fail at once, and soon have spent its budget). One that is given up is
tried again after `max_backoff_s`, since a mesh that does not serve saves nothing by waiting.
"""

from collections import deque

from mesh.supervision.events import Policy

_WELL_IN_STARTS = 2.0
"""Up for two thirds of the time or more; with less, an actor that dies soon after each slow start would never pause."""


class Restarts:
    """The restart account of one actor. `failures`: deaths of its own doing since it last served well."""

    def __init__(self, policy: Policy) -> None:
        self.failures = 0
        self.is_spent = False
        self._policy = policy
        self._charged: deque[float] = deque()
        self._is_free = True
        self._was_ready = False

    def forgive(self) -> None:
        """Clear the account: its end was requested, or an operator wants it started again regardless."""
        self.failures = 0
        self.is_spent = False
        self._charged.clear()

    def ended(self, now: float, *, foreign: bool, start_s: float, ready_s: float | None) -> None:
        """An incarnation ended that took `start_s` to become ready and was ready for `ready_s`; None: never ready."""
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
        """Seconds from the last end to the next start; `is_last`: no other actor of its kind is ready."""
        policy = self._policy
        if self.is_spent:
            return min(policy.max_backoff_s, policy.budget_window_s) if is_last else policy.budget_window_s
        if self._is_free or self.failures <= 1 or (is_last and self._was_ready):
            return 0.0
        # After 32 doublings the pause is at its maximum anyway; the bound keeps the float from overflowing.
        pause_s = min(policy.backoff_s * 2 ** min(self.failures - 2, 32), policy.max_backoff_s)
        return min(pause_s, policy.lone_backoff_s) if is_last else pause_s

"""Which requests are to move away from a group whose worker is dead, as long as it is.

    WorkerAway from the holder   a tokenizer is asked, for all requests there at once, who goes on sooner elsewhere
    it names a group             the holder is asked to cancel the attempt
    it has                       next attempt at that group, which is not a failed one
    it names none, or fails      the request stays, and goes on when the worker is back

The holder cancels first, for its worker may be back at this moment and die of the request once more: the next group has
to know of that before it computes it.

Whoever may have killed the worker moves once, so that a request which does kill cannot go from group to group: until it
has got past the steps that it died in, its attempts say how many workers died, and schedulers count on from there.
Pure; called by the core.
"""

import math
from typing import Final

from nodes.gateway.requests.events import AskMove, GroupAway
from nodes.gateway.requests.log import RequestState
from nodes.gateway.requests.peers import Peers

MAX_AWAY_S: Final = 3600.0
"""Whatever a scheduler says: after an hour a request that is there is asked for again only if it says so again."""


class Moves:
    """The groups that are without a worker, as far as their schedulers have said, and until when."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._away: dict[str, float] = {}
        self.num_moves = 0

    def begin(self, event: GroupAway, now: float) -> None:
        """A group is away. Of a time that is no positive number nothing follows: requests stay."""
        self._away = {name: until for name, until in self._away.items() if until > now}
        if event.returns_in_s > 0 and not math.isnan(event.returns_in_s):
            self._away[event.scheduler] = now + min(event.returns_in_s, MAX_AWAY_S)

    def remaining_s(self, scheduler: str, now: float) -> float:
        """How long the group is away from now on; 0.0 if it should be there."""
        return max(0.0, self._away.get(scheduler, now) - now) if self._away else 0.0

    def ask(self, state: RequestState, now: float) -> AskMove | None:
        """Ask where the request goes, if it may move and there is a group where it could."""
        returns_in_s = self.remaining_s(state.scheduler, now)
        if not returns_in_s or not state.may_move:
            return None
        if not self._peers.has_equal(state.scheduler, with_stand_ins=state.wants_vector):
            return None
        return AskMove(state.scheduler, state.attempt, returns_in_s, state.choose_route())

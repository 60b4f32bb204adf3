"""Planted bugs in what moves away from a dead worker, for the suite `moves`; how they are planted: `mutations.py`."""

from typing import Any

import msgspec

from nodes.gateway.requests.core import GatewayCore
from nodes.gateway.requests.events import Failure
from nodes.gateway.requests.log import RequestState
from nodes.gateway.requests.peers import Peers
from nodes.numerics import Bits
from nodes.protocol import ChooseMoves, Route
from nodes.request import AttemptRef
from nodes.scheduler.worker_link.absence import WorkerAbsence
from nodes.scheduler.worker_link.pipeline import Pipeline
from nodes.scheduler.worker_link.worker_deaths import WorkerDeaths
from nodes.tokenizer.routing.core import RoutingCore
from tests.simulation.planting import bug, nothing, returns


def _as_a_failure(on_let_go: Any, self: GatewayCore, ref: AttemptRef, holder: str, now: float) -> None:
    state = self.requests.get(ref.request_id)
    attempt = -1 if state is None else state.attempt
    on_let_go(self, ref, holder, now)
    if state is None or state.attempt == attempt:
        return
    state.fail(is_lost=False)
    if state.num_failures >= self._config.max_attempts:
        self._end(state, None, Failure("worker_lost", "gave up"), now)


def _as_any_route(_: Any, self: RoutingCore, ask: ChooseMoves, now: float) -> dict[str, Route]:
    return {
        one.request_id: self.choose(
            one.request_id, one.token_ids, one.extra_key, [ask.holder], now, Bits(one.weights, one.numerics), one.asks
        )
        for one in ask.requests
    }


MOVES = {
    "a move counts as a failed attempt": bug(0, (GatewayCore, "_on_let_go", _as_a_failure)),
    "a request that kills moves again and again":
        bug(331, (RequestState, "may_move", property(lambda self: True))),
    "the third death counts only when the next worker is there": bug(273, (WorkerDeaths, "on_died", nothing)),
    "deaths do not go with a request":
        bug(0, (RequestState, "submit", lambda submit, self, gateway: msgspec.structs.replace(
            submit(self, gateway), deaths=0, cleared_at=0))),
    "a cancel says nothing of the step that it comes too late for":
        bug(494, (WorkerAbsence, "may_die_of", returns(set[AttemptRef]()))),
    "what has moved is sent to the next worker all the same": bug(0, (Pipeline, "_has_ended", returns(False))),
    "a move is chosen as any other route": bug(7, (RoutingCore, "choose_moves", _as_any_route),
        (Peers, "has_equal", returns(True))),
}  # fmt: skip

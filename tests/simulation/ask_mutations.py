"""Bugs planted into what requests ask of their draws, from the gateway's bytes to the worker's editors: `mutations.py`.

What a client reads, looks back at or forbids is drawn in half of all meshes (`asking.py`); some workers there are of a
release that does not know all asks.
"""

from types import SimpleNamespace
from typing import Any

import msgspec

from nodes.asks import ASK_NAMES
from nodes.asks.bad_words import _Unspoken
from nodes.asks.edits import RowEdits
from nodes.asks.logprobs import Logprobs
from nodes.asks.matching import _Within
from nodes.request import Asked, RequestSpec, Sampling
from nodes.scheduler.events import Announce
from nodes.scheduler.finish.streams import Streams
from nodes.scheduler.handoff.handoff import Handoff
from nodes.scheduler.rpc_handlers import RpcHandlers
from nodes.scheduler.sequence import Sequence
from nodes.scheduler.worker_link.pipeline import Pipeline
from nodes.tokenizer.routing.core import RoutingCore
from nodes.worker.executor import echo
from nodes.worker.steps import sequence_table
from nodes.worker.steps.sequence_table import OpenSequence, SequenceTable
from tests.simulation.planting import Bug, bug, meanwhile, nothing

altered = msgspec.structs.replace

# what editors are told


def _one_position_late(edits_of: Any, row: Any) -> Any:
    history = row.history if row.history is None else row.history[:-1]
    return edits_of(_Row(row, history, max(0, row.output_position - 1)))


def _without_the_first_output(edits_of: Any, row: Any) -> Any:
    history, first = row.history, row.sequence.num_prompt_tokens
    return edits_of(_Row(row, history and history[:first] + history[first + 1 :], row.output_position))


class _Row(SimpleNamespace):
    def __init__(self, row: Any, history: Any, position: int) -> None:
        super().__init__(row=row.row, sequence=row.sequence, history=history, output_position=position)


def _keep_editors(opened: Any, self: SequenceTable, opening: Any) -> OpenSequence:
    one, before = opened(self, opening), self._slots.get(opening.slot)
    if before is not None and before.editors and one.editors:
        one.editors = before.editors
    return one


def _take_in_at_each_call(edit: Any, self: Any, history: Any, position: int, edits: RowEdits) -> None:
    taken = self.__dict__.setdefault("taken", list(history[:-1]))
    taken += history[-1:]
    edit(self, taken, position, edits)


def _take_in_what_was_drawn(mask: Any, self: Any, output: Any) -> bytes:
    found = mask(self, output)
    # As if the token that is most likely to come were taken in with the draw.
    if self._matcher is not None and (
        first := next((one for one in range(256) if found[one >> 3] >> (one & 7) & 1), 0)
    ):
        self._matcher.consume_token(first)
    return found


# what is lost on the way


def _without(spec: RequestSpec, names: Any) -> RequestSpec:
    return altered(spec, sampling=_asking_less(spec.sampling, names))


def _asking_less(sampling: Sampling, names: Any) -> Sampling:
    return altered(sampling, asks=[ask for ask in sampling.asks if ask.name not in names])


def _lost_later(names: Any) -> Any:
    def from_submit(original: Any, row_id: int, submit: Any, *more: Any) -> Sequence:
        return original(row_id, altered(submit, spec=_without(submit.spec, names)) if submit.attempt else submit, *more)

    return from_submit


def _order_less(order: Any, self: Handoff, *arguments: Any) -> Any:
    ordered = order(self, *arguments)
    return altered(ordered, spec=_without(ordered.spec, ASK_NAMES))


def _one_token_late(take: Any, self: Sequence, token_id: int, extra: bytes) -> None:
    take(self, token_id, b"")
    if extra:
        self.extras[self.num_output_tokens] = extra


def _open_what_is_known(open_asks: Any, asks: list[Asked], model: Any) -> Any:
    return open_asks([ask for ask in asks if ask.name in ASK_NAMES], model)


def _nothing_read(_: Sequence) -> dict[int, bytes]:
    return {}


ROUTED_ANYWHERE = (RoutingCore, "_able", lambda able, self, asks, now: able(self, (), now))


def _of_nothing(announcement: Any, self: Pipeline, state: Any, **how: Any) -> Announce:
    return announcement(self, state, **how)._replace(asks=())


TAKEN_UNSEEN = (RpcHandlers, "_problem_of_asks", nothing)

ASKING: dict[str, Bug] = {
    "edits are those of the position before": bug(5, (echo, "edits_of", _one_position_late)),
    "what was said lacks the token that a prefill drew": bug(5, (echo, "edits_of", _without_the_first_output)),
    "a slot keeps the editors of the sequence before": bug(3, (SequenceTable, "_opened", _keep_editors)),
    "an editor takes in a token at each call": bug(10, (_Unspoken, "edit", _take_in_at_each_call)),
    "a matcher takes in what may be drawn": bug(5, (_Within, "_mask", _take_in_what_was_drawn)),
    "a mask is cut": bug(5, (RowEdits, "allow", lambda allow, self, mask: allow(self, mask[:13]))),
    "what is read of a token goes with the next one": bug(3, (Sequence, "take_token", _one_token_late)),
    "tokens that are sent again come without what was read":
        bug(13, (Streams, "resend", meanwhile(1, "extras", _nothing_read))),
    "streams are opened again without what was read":
        bug(13, (Streams, "reopen", meanwhile(1, "extras", _nothing_read))),
    "streams of a lost detokenizer go on without what was read":
        bug(5, (Streams, "_move", meanwhile(1, "extras", _nothing_read))),
    "later attempts read nothing": bug(10, (Sequence, "from_submit", _lost_later([Logprobs.name]))),
    "later attempts ask for nothing": bug(0, (Sequence, "from_submit", _lost_later(ASK_NAMES))),
    "a prefill elsewhere does not know what is asked": bug(5, (Handoff, "order", _order_less)),
    "nobody announces what can be asked": bug(0, (Pipeline, "announcement", _of_nothing)),
    # A scheduler that is asked for what its worker does not know refuses, and so does its worker.
    "routes lead to workers that cannot do what is asked": bug(10, ROUTED_ANYWHERE, TAKEN_UNSEEN),
    "a worker ignores what it does not know":
        bug(10, ROUTED_ANYWHERE, TAKEN_UNSEEN, (sequence_table, "open_asks", _open_what_is_known)),
}  # fmt: skip

"""Scenarios in which a quarter of the clients want vectors: pooled chunk by chunk beside tokens, lost, told again."""

import random
from array import array
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec

from nodes.gateway.requests.core import GatewayCore
from nodes.gateway.requests.events import End
from nodes.gateway.requests.log import RequestState
from nodes.request import TOKENS, VECTOR_KINDS
from nodes.scheduler.finish.streams import Streams
from nodes.scheduler.sequence import Sequence
from nodes.worker.steps.sequence_table import OpenSequence
from nodes.worker.vectors.pooling import VectorRows
from tests.simulation import scenario
from tests.simulation.asking import NOTHING
from tests.simulation.planting import Bug, bug
from tests.simulation.scenario import Client


def draw_kinds(seed: int, clients: list[Client]) -> list[Client]:
    """A quarter of the clients want a vector; of the others, some leave the same prompts in the caches."""
    draw = random.Random(f"vectors/{seed}")
    wanted = {"asks": NOTHING, "max_tokens": 1, "min_tokens": 0, "stop": "", "prompt_top": -1}
    return [
        replace(client, kind=draw.choice(VECTOR_KINDS), **wanted) if draw.random() < 0.25 else client
        for client in clients
    ]


def run_seed(seed: int) -> Counter[str]:
    """Run one seed; returns how often each fault came. Raises AssertionError with the messages and the replay."""
    return scenario.run_seed(seed, draw_kinds, "vectors")


# planted bugs


def _of_the_position_before(places: Any, self: VectorRows, firsts: Any) -> "array[int]":
    """Of a row's first position that is a position of another request."""
    return array("i", [max(0, at - 1) for at in places(self, firsts)])


def _from_wherever(_: Any, self: OpenSequence, position: int) -> bytes | None:
    return b"" if not position else self._carried[max(self._carried)]


def _end_again(on_pooled: Any, self: GatewayCore, event: Any, now: float) -> None:
    on_pooled(self, event, now)
    self._commands += [command for command in self._commands if isinstance(command, End)]


def _decode_it(from_submit: Any, *arguments: Any) -> Sequence:
    sequence = from_submit(*arguments)
    if sequence.is_vector:
        sequence.is_vector, sequence.max_length = False, sequence.max_length + 3
        sequence.detokenizer = arguments[1].detokenizer or "detokenizer-0"
    return sequence


def _tokens_later(submit: Any, self: RequestState, gateway: str) -> Any:
    first = submit(self, gateway)
    return (
        msgspec.structs.replace(first, spec=msgspec.structs.replace(first.spec, kind=TOKENS)) if self.attempt else first
    )


def _once(tell: Any, self: Streams, sequence: Sequence) -> None:
    told = self.__dict__.setdefault("told", set())
    if sequence.row_id not in told:
        told.add(sequence.row_id)
        tell(self, sequence)


VECTORS: dict[str, Bug] = {
    "a vector is made of another request's rows": bug(2, (VectorRows, "places", _of_the_position_before)),
    "a mean counts a chunk twice": bug(6, (OpenSequence, "carried_to", _from_wherever)),
    "a vector ends its request twice": bug(2, (GatewayCore, "_on_pooled", _end_again)),
    "a request for a vector is decoded": bug(2, (Sequence, "from_submit", _decode_it)),
    "states are pooled from behind what is cached":
        bug(8, (Sequence, "reusable_ids", property(lambda self: self.token_ids))),
    "later attempts want tokens": bug(25, (RequestState, "submit", _tokens_later)),
    "a vector is told once": bug(61, (Streams, "tell_vector", _once)),
}  # fmt: skip

"""Tokens find the events that they are the text of, wherever a parser cuts it."""

from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.gateway.fields.openai_types import DrawnTokenLogprob
from nodes.gateway.parsers.events import Event, Mark, Reasoning, Text
from nodes.gateway.surfaces.responses.alignment import TokenAlignment


def token(data: bytes) -> DrawnTokenLogprob:
    return DrawnTokenLogprob(token="", logprob=-1.0, bytes=list(data), top_logprobs=[])


def cut(data: Any, places: list[int]) -> list[Any]:
    ends = sorted({0, len(data), *(place for place in places if place < len(data))})
    return [data[begin:end] for begin, end in pairwise(ends)]


CUTS = st.lists(st.integers(0, 40))


@settings(max_examples=80)
@given(st.text(max_size=15), st.text(max_size=15), CUTS, CUTS)
def test_text_gets_the_tokens_that_begin_in_it(
    thought: str, said: str, of_tokens: list[int], of_said: list[int]
) -> None:
    written = f"<t>{thought}</t>{said}"
    tokens = [token(data) for data in cut(written.encode(), of_tokens)]
    events: list[Event] = [Mark("<t>"), Reasoning(thought), Mark("</t>"), *map(Text, cut(said, of_said))]
    at_once, alignment = TokenAlignment(), TokenAlignment()
    at_once.add(tokens)
    taken = [at_once.take(event) for event in events]
    for one in tokens:
        alignment.add([one])
    assert [alignment.take(event) for event in events] == taken
    num_before = len(written.removesuffix(said).encode())
    places = [sum(len(one.bytes) for one in tokens[:index]) for index in range(len(tokens))]
    # A token that begins inside a character begins with it.
    inside = {len(written[:at].encode()) + more for at in range(len(written)) for more in range(1, 4)
              if more < len(written[at].encode())}  # fmt: skip
    sure = [one for one, place in zip(tokens, places, strict=True) if place >= num_before and place not in inside]
    found = [one for some in taken[3:] for one in some]
    assert [one for one in found if one in sure] == sure


def test_what_is_no_text_is_passed_over() -> None:
    alignment = TokenAlignment()
    tokens = [token(b"<|begin|>"), token(b" a"), token(b"b"), token(b"<|end|>")]
    alignment.add(tokens)
    assert alignment.take(Text("a")) == [tokens[1]]
    assert alignment.take(Text("b")) == [tokens[2]]


def test_what_the_model_did_not_write_has_no_tokens() -> None:
    alignment = TokenAlignment()
    alignment.add([token(b"said")])
    assert alignment.take(Text("other")) == []
    assert alignment.take(Text("said")) == [token(b"said")]

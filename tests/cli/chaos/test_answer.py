"""The oracle: what is gathered of an answer, and what counts as another one."""

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.bench.answer import Misdeed
from cli.chaos.answer import CANCELLED, Answer, StreamReader, WholeReader, begins, differences

USAGE = {"prompt_tokens": 8, "completion_tokens": 3}
DONE = b"data: [DONE]\n\n"


def event(text: str, number: int, end: str | None = None) -> dict[str, Any]:
    logprobs = {"tokens": [text], "token_logprobs": [-number], "top_logprobs": [{}], "text_offset": [number]}
    return {"choices": [{"text": text, "token_ids": [number], "logprobs": logprobs, "finish_reason": end}]}


def sent(*events: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in events)


THREE = sent(event("ä", 1), event("b", 2), event("c", 3, "length"), {"choices": [], "usage": USAGE}) + DONE
WANTED = Answer("äbc", [1, 2, 3], [("ä", -1, {}, 1), ("b", -2, {}, 2), ("c", -3, {}, 3)], "length", (8, 3))


def read(data: bytes, cuts: list[int] | None = None, cancel_after: int = 0) -> Answer:
    answer = Answer()
    reader = StreamReader(answer, lambda: None, cancel_after)
    places = [0, *sorted(cuts or []), len(data)]
    for begin, end in itertools.pairwise(places):
        reader.feed(data[begin:end], 0.0)
    reader.ended()
    return answer


@given(st.lists(st.integers(0, len(THREE)), max_size=8))
def test_a_stream_is_the_same_answer_however_it_is_cut(cuts) -> None:
    assert differences([read(THREE, cuts)], [WANTED]) == []


def test_what_is_not_streamed_is_the_same_answer() -> None:
    whole = event("äbc", 1, "length") | {"usage": USAGE}
    (choice,) = whole["choices"]
    choice["token_ids"] = [1, 2, 3]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    choice["logprobs"] = dict(zip(names, map(list, zip(*WANTED.logprobs, strict=True)), strict=True))
    answer = Answer()
    reader = WholeReader(answer, lambda: None)
    reader.feed(json.dumps(whole).encode(), 0.0)
    reader.ended()
    assert differences([answer], [WANTED]) == []


def test_a_chat_is_its_text_and_its_calls_without_their_ids() -> None:
    call = {"id": "call_1", "index": 0, "function": {"name": "fill", "arguments": '{"a"'}}
    more = {"index": 0, "function": {"arguments": ": 1}"}}
    deltas = [{"role": "assistant"}, {"content": "so: "}, {"tool_calls": [call]}, {"tool_calls": [more]}]
    events = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    assert read(sent(*events) + DONE).text == 'so: fill{"a": 1}'


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (sent(event("a", 1)), "ended_early"),
        (sent({"error": {"message": "lost"}}), "error_event"),
        (b"data: {nonsense\n\n", "garbled"),
        (sent({"choices": [{"text": "a"}]}), "garbled"),
        (sent({"choices": 7}), "garbled"),
        (sent({"choices": [{"delta": None, "finish_reason": None}]}), "garbled"),
    ],
)
def test_a_damaged_stream_has_a_kind(data, kind) -> None:
    with pytest.raises(Misdeed) as caught:
        read(data)
    assert caught.value.kind == kind


def test_a_damaged_whole_answer_has_a_kind() -> None:
    reader = WholeReader(Answer(), lambda: None)
    reader.feed(b'{"choices": [{"te', 0.0)
    with pytest.raises(Misdeed) as caught:
        reader.ended()
    assert caught.value.kind == "ended_early"


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_client_that_goes_away_has_what_the_whole_answer_begins_with(after) -> None:
    answer = Answer()
    reader = StreamReader(answer, lambda: None, cancel_after=after)
    with pytest.raises(Misdeed) as caught:
        reader.feed(THREE, 0.0)
    assert caught.value.kind == CANCELLED
    assert len(answer.token_ids) == after
    assert begins(answer, WANTED)
    assert not begins(replace(answer, text="x" + answer.text[1:]), WANTED)
    assert not begins(replace(answer, token_ids=[9]), WANTED)
    assert not begins(replace(answer, logprobs=[("ä", -1.5, {}, 1)]), WANTED)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"text": "äxc"}, "differ from character 1"),
        ({"token_ids": [1, 2, 9]}, "token 2 is 9, not 3"),
        ({"logprobs": WANTED.logprobs[:2]}, "2 of 3 logprobs"),
        ({"usage": (8, 4)}, "usage (8, 4) for (8, 3)"),
        ({"finish_reason": "stop"}, "stop"),
        ({"failure": "reset", "detail": "by peer"}, "reset: by peer"),
    ],
)
def test_whatever_a_client_can_tell_is_a_difference(other, says) -> None:
    (found,) = differences([replace(WANTED, **other)], [WANTED])
    assert says in found


def test_what_is_a_matter_of_timing_is_none() -> None:
    assert differences([replace(WANTED, num_events=2, is_open=True)], [WANTED]) == []

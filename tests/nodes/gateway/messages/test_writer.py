"""Streamed and whole messages from a parser's events, as the `anthropic` package reads them."""

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.gateway.jobs.answer_parts import parts_of
from nodes.gateway.parsers import ParserNames, make_parser
from nodes.gateway.parsers.call_ids import call_id
from nodes.gateway.parsers.events import CallArguments, CallBegin, CallEnd, Event, Mark, Reasoning, Text
from nodes.gateway.surfaces.messages.answer import stop_reason_of, usage_of
from nodes.gateway.surfaces.messages.types import MessageAnswer
from nodes.gateway.surfaces.messages.writer import MessageEvents, content_of
from tests.nodes.gateway.messages.anthropic_events import events_of, message_of, whole_message

TOOLS = {"weather": {"type": "object"}, "time": {"type": "object"}}
ANSWERS = [
    "Hello there.",
    "",
    "<think>\nLet me see.\n</think>\n\nIt is 4.",
    '<think>Rom or Paris?</think>I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rom \\u00e9"}}\n'
    "</tool_call>",
    '<tool_call>\n{"name": "weather", "arguments": {"city": "a"}}\n</tool_call>\n<tool_call>\n{"name": "time", '
    '"arguments": {}}\n</tool_call>\nDone.',
    '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>',
    "<think>never ends",
]


def id_of(index: int) -> str:
    return call_id("msg_1", index)


def streamed(pieces: list[list[Event]], usage: Any, *, hides: bool = False) -> bytes:
    writer = MessageEvents("msg_1", "tiny", id_of, hides_thinking=hides)
    stream = writer.start(12) + b"".join(writer.events(piece) for piece in pieces)
    return stream + writer.end("end_turn", None, usage)


def whole(events: list[Event], usage: Any, *, hides: bool = False) -> bytes:
    content = content_of(parts_of(events), id_of, hides_thinking=hides)
    answer = MessageAnswer(
        id="msg_1", model="tiny", content=content, stop_reason="end_turn", stop_sequence=None, usage=usage
    )
    return msgspec.json.encode(answer)


@settings(max_examples=60)
@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 150), max_size=8), st.booleans())
def test_streamed_is_whole_however_the_text_is_cut(answer: str, cuts: list[int], hides: bool) -> None:
    parser = make_parser(ParserNames("hermes", "qwen3"), "", TOOLS)
    places = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    pieces = [parser.feed(answer[begin:end]) for begin, end in pairwise(places)]
    pieces.append(parser.close())
    usage = usage_of(12, 5, 30)
    message = message_of(events_of(streamed(pieces, usage, hides=hides)))
    assert message == whole_message(whole([event for piece in pieces for event in piece], usage, hides=hides))
    assert message["usage"] == {
        "input_tokens": 7, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 0, "output_tokens": 30
    }  # fmt: skip


def test_every_kind_of_block() -> None:
    events: list[Event] = [
        Mark("<think>"), Reasoning("Two "), Reasoning("calls."), Mark("</think>"), Text("I "), Text("look."),
        CallBegin(0, "weather", "<tool_call>"), CallArguments(0, '{"city":', ""), CallArguments(0, ' "Rom"}', ""),
        CallEnd(0, True, ""), CallBegin(1, "time", ""), CallArguments(1, "{}", ""), CallEnd(1, True, ""), Text("Done."),
    ]  # fmt: skip
    stream = events_of(streamed([events], usage_of(12, 0, 9)))
    kinds = [event.type for event in stream]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert stream[0].message.usage.input_tokens == 12
    message = message_of(stream)
    thought, *rest = message["content"]
    assert thought["thinking"] == "Two calls."
    assert thought["signature"]
    assert rest == [
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": id_of(0), "name": "weather", "input": {"city": "Rom"}},
        {"type": "tool_use", "id": id_of(1), "name": "time", "input": {}},
        {"type": "text", "text": "Done."},
    ]
    assert message["stop_reason"] == "end_turn"
    [hidden, *others] = json.loads(whole(events, usage_of(12, 0, 9), hides=True))["content"]
    assert hidden == {"type": "thinking", "thinking": "", "signature": thought["signature"]}
    assert others == rest


def test_text_without_a_parser_is_the_same() -> None:
    usage = usage_of(1, 0, 2)
    writer = MessageEvents("msg_1", "tiny", id_of)
    stream = writer.start(12) + writer.text("Hel") + writer.text('lo "\n') + writer.end("end_turn", None, usage)
    assert stream == streamed([[Text("Hel")], [Text('lo "\n')]], usage)


def test_a_call_that_is_cut_is_text_after_what_was_told_of_it() -> None:
    cut: list[Event] = [Text("I look."), CallBegin(0, "time", ""), CallArguments(0, '{"zo', ""), CallEnd(0, False, "")]
    events = [*cut, Text('{"zo')]
    told = [event for event in events_of(streamed([events], usage_of(1, 0, 2))) if hasattr(event, "content_block")]
    assert [event.content_block.type for event in told] == ["text", "tool_use", "text"]
    content = json.loads(whole(events, usage_of(1, 0, 2)))["content"]
    assert content == [{"type": "text", "text": "I look."}, {"type": "text", "text": '{"zo'}]


@pytest.mark.parametrize(
    ("finish", "calls", "stop", "num", "reason"),
    [
        ("stop", False, None, 5, "end_turn"),
        ("stop", True, None, 5, "tool_use"),
        ("tool_calls", True, None, 5, "tool_use"),
        ("stop", False, "###", 5, "stop_sequence"),
        ("length", True, None, 10, "max_tokens"),
        ("length", False, None, 9, "model_context_window_exceeded"),
    ],
)
def test_stop_reasons(finish: str, calls: bool, stop: str | None, num: int, reason: str) -> None:
    found = stop_reason_of(finish, has_calls=calls, stop_sequence=stop, num_output_tokens=num, max_tokens=10)
    assert found == reason

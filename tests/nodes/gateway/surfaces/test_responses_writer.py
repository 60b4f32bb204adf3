"""The stream of a response: what is in it, that OpenAI's own types take it, and that it joins to the whole answer."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response as OpenAIResponse

from nodes.gateway.answers.responses import usage_of
from nodes.gateway.answers.sse import ENCODE
from nodes.gateway.errors import BadRequest, Internal, TooManyRequests
from nodes.gateway.fields.openai_types import DrawnTokenLogprob, TokenLogprob
from nodes.gateway.parsers.events import END, CallArguments, CallBegin, CallEnd, Event, Mark, Reasoning, Text
from nodes.gateway.surfaces.responses.echo import first_response
from nodes.gateway.surfaces.responses.translation import read, translate
from nodes.gateway.surfaces.responses.writer import Found, ResponseWriter
from nodes.request import Sampling
from tests.nodes.gateway.surfaces.openai_events import events_of

USAGE = usage_of(10, 8, 4, 2)
TOOLS = [
    {"type": "function", "name": "get", "parameters": {"type": "object", "properties": {}}, "strict": True},
    {"type": "custom", "name": "patch", "description": "Edits.", "format": {"type": "text"}},
    {"type": "namespace", "name": "files", "description": "F.", "tools": [{"type": "function", "name": "read"}]},
]
WHOLE: list[Event] = [
    Reasoning("Let me "), Reasoning("see."), Mark("</think>"), Text("Well"), Text(", yes.\n"), Mark("<call>"),
    CallBegin(0, "get", "<"), CallArguments(0, '{"a":', '{"a":'), CallArguments(0, "1}", "1}"), CallEnd(0, True, ">"),
    CallBegin(1, "patch", "<"), CallArguments(1, '{"input":"*** a\\u00', "x"), CallArguments(1, 'e9\\n"}', "x"),
    CallEnd(1, True, ">"), CallBegin(2, "files__read", "<"), CallArguments(2, "{}", "{}"), CallEnd(2, True, ">"), END,
]  # fmt: skip


def writer(**body: Any) -> ResponseWriter:
    asked = read(json.dumps({"input": "hello", "tools": TOOLS, **body}).encode())
    first = first_response(asked, "resp_ab", created=5, model="m", sampling=Sampling(), is_kept=False)
    tools = translate(asked).tools
    return ResponseWriter(first, tools, lambda index: f"call_{index}", seals_reasoning=asked.seals_reasoning)


def stream(found: Iterable[Event], finish_reason: str = "stop", **body: Any) -> list[dict[str, Any]]:
    write = writer(**body)
    data = write.start() + b"".join(write.piece([Found(event)]) for event in found) + write.close(finish_reason)
    return events_of(data + write.end(write.ended(finish_reason, USAGE, 7)))


def response(found: Sequence[Event], finish_reason: str = "stop", **body: Any) -> dict[str, Any]:
    write = writer(**body)
    write.piece([Found(event) for event in found])
    write.close(finish_reason)
    said = ENCODE(write.ended(finish_reason, USAGE, 7))
    OpenAIResponse.model_validate_json(said, strict=True)
    return json.loads(said)


def test_every_event_in_order() -> None:
    kinds = [event["type"].removeprefix("response.") for event in stream(WHOLE)]
    text = ["output_item.added", "content_part.added", *["output_text.delta"] * 2, "output_text.done"]
    reasoning = [*text[:2], *["reasoning_text.delta"] * 2, "reasoning_text.done"]
    call = ["output_item.added", *["function_call_arguments.delta"] * 2, "function_call_arguments.done"]
    custom = ["output_item.added", *["custom_tool_call_input.delta"] * 2, "custom_tool_call_input.done"]
    ends = ["content_part.done", "output_item.done"]
    assert kinds == [
        "created", "in_progress", *reasoning, *ends, *text, *ends, *call, ends[-1], *custom, ends[-1],
        call[0], call[1], call[3], ends[-1], "completed",
    ]  # fmt: skip


def test_the_items_of_a_whole_answer() -> None:
    said = response(WHOLE)
    assert said["status"] == "completed"
    assert said["output"] == [
        {"type": "reasoning", "id": "rs_ab_0", "status": "completed", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Let me see."}]},
        {"type": "message", "id": "msg_ab_1", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "Well, yes.\n", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_ab_2", "status": "completed", "call_id": "call_0", "name": "get",
         "arguments": '{"a":1}'},
        {"type": "custom_tool_call", "id": "ctc_ab_3", "status": "completed", "call_id": "call_1", "name": "patch",
         "input": "*** aé\n"},
        {"type": "function_call", "id": "fc_ab_4", "status": "completed", "call_id": "call_2", "name": "read",
         "namespace": "files", "arguments": "{}"},
    ]  # fmt: skip
    assert said["usage"] == {
        "input_tokens": 10, "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0}, "output_tokens": 8,
        "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 18,
    }  # fmt: skip


FOUND = st.lists(
    st.one_of(
        st.builds(Reasoning, st.text(max_size=4)),
        st.builds(Text, st.text(max_size=4)),
        st.builds(Mark, st.text(max_size=2)),
        st.tuples(st.sampled_from(["get", "patch", "files__read"]), st.text(max_size=4), st.booleans()),
    ),
    max_size=8,
)


def flat(found: list[Any]) -> list[Event]:
    events: list[Event] = []
    for index, one in enumerate(found):
        if type(one) is tuple:
            name, text, whole = one
            arguments = json.dumps({"input": text})[: None if whole else -2]
            pieces = [CallArguments(index, char, char) for char in arguments]
            events += [CallBegin(index, name, "<"), *pieces, CallEnd(index, whole, ">")]
            # As `answers.py` gives it.
            events += [] if whole else [Text("<" + arguments)]
        else:
            events.append(one)
    return [*events, END]


@settings(max_examples=60)
@given(FOUND, st.sampled_from(["stop", "length", "tool_calls"]))
def test_a_stream_joins_to_the_whole_answer(found: list[Any], reason: str) -> None:
    events, whole = stream(flat(found), reason), response(flat(found), reason)
    assert events[-1]["response"] == whole
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == whole["output"]
    joined = [""] * len(whole["output"])
    for event in events:
        if event["type"].endswith(".delta"):
            assert event["item_id"] == whole["output"][event["output_index"]]["id"]
            joined[event["output_index"]] += event["delta"]
    assert joined == [
        item.get("arguments", item.get("input", "")) or "".join(part["text"] for part in item.get("content", []))
        for item in whole["output"]
    ]


def test_reasoning_that_is_asked_for_sealed_is_in_the_item_alone() -> None:
    events = stream([Reasoning("hm"), Text("a"), END], include=["reasoning.encrypted_content"])
    sealed = [event for event in events if "encrypted_content" in json.dumps(event)]
    assert [event["type"] for event in sealed] == ["response.output_item.done", "response.completed"]


def test_an_answer_that_is_cut() -> None:
    call = [CallBegin(0, "get", "<"), CallArguments(0, '{"a', ""), CallEnd(0, False, ""), Text('<{"a')]
    said = response([Text("a"), *call, END], "length")
    assert (said["status"], said["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in said["output"]] == ["completed", "incomplete"]
    assert stream([Reasoning("a"), END], "length")[-1]["type"] == "response.incomplete"


def test_nothing_at_all_is_an_empty_message() -> None:
    assert response([END])["output"][0]["content"][0]["text"] == ""


def test_logprobs() -> None:
    likely = [TokenLogprob(token="b", logprob=-2.0, bytes=[98])]
    drawn = [DrawnTokenLogprob(token="a", logprob=-0.5, bytes=[97], top_logprobs=likely)]
    write = writer()
    data = write.start() + write.piece([Found(Text("a"), drawn), Found(Text("b"))]) + write.close("stop")
    events = events_of(data + write.end(write.ended("stop", USAGE, 7)))
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [len(one) for one in deltas] == [1, 0]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == deltas[0]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Internal("broke"), "server_error"),
        (TooManyRequests("full"), "rate_limit_exceeded"),
        (BadRequest("bad", param="input"), "invalid_prompt"),
    ],
)
def test_a_response_that_fails(error: Any, code: str) -> None:
    write = writer()
    events = events_of(write.start() + write.piece([Found(Text("a"))]) + write.failed(error))
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == code
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"
    # Agents run what is done.
    assert not any(event["type"] == "response.output_item.done" for event in events)


def test_an_error_that_nobody_expected() -> None:
    write = writer()
    assert events_of(write.start() + write.error(Internal("broke")))[-1]["message"] == "broke"

"""Chats with calls and reasoning: what is streamed, joined as clients do, is the whole answer."""

import json
import random
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.gateway.answers.answering import Answering
from nodes.gateway.answers.responses import Head, usage_so_far
from nodes.gateway.answers.sse import DONE
from nodes.gateway.answers.token_details import TokenDetails
from nodes.gateway.asked.answer_form import AnswerForm
from nodes.gateway.config import GatewayConfig
from nodes.gateway.jobs.answer_events import AnswerFields, Answers, SampleEvents
from nodes.gateway.jobs.validation import Validator
from nodes.gateway.parsers import ParserNames, make_parser
from nodes.gateway.requests.events import End, Opened, Tokens
from nodes.gateway.requests.outputs import CallOutput, Generation
from nodes.gateway.surfaces.chat import CHAT
from nodes.protocol import Route
from nodes.request import RequestSpec, Sampling, StopRules
from tests.nodes.gateway.parsers.written import FORMS, TAILS, damaged, garbage, names_of, random_answer

NUM_ANSWERS = 10_000
VALIDATOR = Validator(GatewayConfig(model_name="m", context_length=100_000))


def answering(form: str, tools: dict[str, Any], *, whole: bool, one_call: bool = False) -> Answering:
    body = {"messages": [{"role": "user", "content": "hi"}], "return_token_ids": True, "stream": not whole}
    job = VALIDATOR.chat(json.dumps(body).encode(), "chatcmpl-1")
    job = job._replace(answer=job.answer._replace(tools=tools, one_call=one_call))
    spec = RequestSpec(Sampling(), StopRules(9))
    opened = Opened(request_id="r-0", prompt_ids=[1, 2], spec=spec, route=Route(decode="d"), arrived_at=0.0)
    made = Generation([opened], CallOutput(1, whole=whole), 1)
    head = Head(id="chatcmpl-1", object="o", created=1, model="m", system_fingerprint="f")
    calls = names_of(form).calls
    reasoning = "openai_gptoss" if calls == "openai" else "qwen3"
    answers = Answers(AnswerForm(ParserNames(calls, reasoning)), job.answer, TAILS.get(form, ""), ["r-0"])
    return Answering(head, job, made, TokenDetails(job, made), answers)


def ended(reason: str) -> End:
    return End("r-0", reason, None, 2, 3, 0, 1.0)


def whole(form: str, text: str, tools: dict[str, Any], reason: str, *, one_call: bool = False) -> dict[str, Any]:
    given = answering(form, tools, whole=True, one_call=one_call)
    given.generation.output.deliver(0, text, len(text), 0, Tokens([*map(ord, text)], []))
    given.generation.output.end(0, ended(reason))
    return json.loads(msgspec.json.encode(CHAT.whole(given)))["choices"][0]


def streamed(
    form: str, text: str, tools: dict[str, Any], cuts: list[int], reason: str, *, one_call: bool = False
) -> list[dict[str, Any]]:
    """The chunks' choices."""
    given = answering(form, tools, whole=False, one_call=one_call)
    writer, bounds = CHAT.writer(given), [0, *sorted(cuts), len(text)]
    assert given.answers is not None
    sample, written = given.answers.samples[0], writer.start()
    for begin, end in pairwise(bounds):
        piece = text[begin:end]
        written += writer.piece(0, sample.feed(piece), None, Tokens([*map(ord, piece)], []))
    written += writer.piece(0, sample.close(), ended(reason), None)
    written += writer.finish()
    lines = written.removesuffix(DONE).split(b"\n\n")
    return [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines if line]


def joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """As clients join deltas."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "function_call": None}
    ids: list[int] = []
    for choice in choices:
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        assert delta.get("reasoning") == delta.get("reasoning_content")
        ids += choice.get("token_ids") or []
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                assert call["index"] == len(message["calls"])
                message["calls"].append([call["id"], call["function"]["name"], ""])
            message["calls"][call["index"]][2] += call["function"]["arguments"]
        if part := delta.get("function_call"):
            message["function_call"] = message["function_call"] or [part["name"], ""]
            message["function_call"][1] += part["arguments"]
    return {**message, "ids": ids, "finish_reason": choices[-1]["finish_reason"]}


def check(
    form: str,
    text: str,
    tools: dict[str, Any],
    dice: random.Random,
    *,
    is_damaged: bool = False,
    one_call: bool = False,
) -> None:
    reason = dice.choice(["stop", "length"])
    wanted = whole(form, text, tools, reason, one_call=one_call)
    cuts = [dice.randrange(len(text) + 1) for _ in range(dice.choice([0, 3, len(text)]))]
    got = joined(streamed(form, text, tools, cuts, reason, one_call=one_call))
    message = wanted["message"]
    assert got["content"] == (message["content"] or "")
    assert got["reasoning"] == message.get("reasoning", "")
    assert (got["ids"], got["finish_reason"]) == (wanted["token_ids"], wanted["finish_reason"])
    calls = [[one["id"], *one["function"].values()] for one in message.get("tool_calls", ())]
    # One that was begun and is not whole is text as well, which is all that a whole answer has of it.
    assert [one for one in got["calls"] if one in calls] == calls
    assert is_damaged or got["calls"] == calls
    assert (wanted["finish_reason"] == "tool_calls") == (reason == "stop" and bool(calls))


def check_all(form: str, dice: random.Random) -> None:
    written = random_answer(dice, form)
    thought = "" if form == "openai" else dice.choice(["", "<think>\nHm.\n</think>\n\n"])
    check(form, thought + written.text, written.tools, dice)
    for text in (damaged(dice, thought + written.text), garbage(dice)):
        check(form, text, written.tools, dice, is_damaged=True)
    check(form, written.text, written.tools, dice, one_call=True)


@pytest.mark.parametrize("form", FORMS)
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=25, deadline=None)
def test_streamed_is_whole(form: str, seed: int) -> None:
    check_all(form, random.Random(seed))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_ten_thousand_streamed_are_whole(form: str) -> None:
    for seed in range(NUM_ANSWERS // len(FORMS)):
        check_all(form, random.Random(seed))


def test_tokens_of_what_nobody_sees_come_with_the_next_piece() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    choices = streamed("hermes", text, {"f": {}}, list(range(len(text))), "stop")
    assert joined(choices)["ids"] == [*map(ord, text)]
    assert [choice["delta"] for choice in choices][1:] == [
        {"tool_calls": [{"index": 0, "id": choices[1]["delta"]["tool_calls"][0]["id"], "type": "function",
                         "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
        {"content": ""},
    ]  # fmt: skip


def test_reasoning_is_counted_alike_in_whole_answers_in_streams_and_where_it_is_hidden() -> None:
    text = "<think>" + "r" * 23 + "</think>" + "a" * 62
    for shown in ("apart", "text", "hidden"):
        given = answering("hermes", {}, whole=True)
        assert given.answers is not None
        sample = SampleEvents(make_parser(ParserNames("hermes", "qwen3"), "", {}), AnswerFields(True, reasoning=shown))
        given.answers.samples[0] = sample
        given.generation.output.deliver(0, text, 50)
        given.generation.output.end(0, ended("stop"))
        usage = CHAT.whole(given).usage
        assert (usage.completion_tokens, usage.completion_tokens_details.reasoning_tokens) == (50, 12)
    given = answering("hermes", {}, whole=False)
    assert given.answers is not None
    for at, piece in enumerate((text[:20], text[20:])):
        given.generation.output.deliver(0, piece, 25)
        given.answers.samples[0].feed(piece)
        so_far = usage_so_far(given.generation, given.answers, 0).completion_tokens_details
        assert so_far.reasoning_tokens == (16, 12)[at]
    assert usage_so_far(given.generation, None, 0).completion_tokens_details.reasoning_tokens == 0

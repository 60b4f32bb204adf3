"""What waits for its writer, and how it leaves."""

import asyncio
import json
from typing import Any

import pytest

from nodes.gateway.answers.answering import Answering
from nodes.gateway.answers.responses import Head, total_usage, usage_so_far
from nodes.gateway.answers.sse import DONE
from nodes.gateway.answers.surface import Surface
from nodes.gateway.answers.token_details import TokenDetails
from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import Internal
from nodes.gateway.jobs.validation import Validator
from nodes.gateway.requests.events import End, Failure, Opened
from nodes.gateway.requests.outputs import CallOutput, Generation, Piece
from nodes.gateway.surfaces.chat import CHAT
from nodes.gateway.surfaces.text import TEXT
from nodes.protocol import Route
from nodes.request import RequestSpec, Sampling, StopRules

HEAD = Head(id="x-1", object="o", created=7, model='m"ü', system_fingerprint="fp")


def end(reason: str | None = "stop", failure: Failure | None = None, cached: int = 2) -> End:
    return End("r", reason, failure, 3, 4, cached, 1.0)


def generation(num_prompts: int, n: int, *, whole: bool = False) -> Generation:
    requests = [
        Opened(
            request_id=str(i), prompt_ids=[1] * (10 + i // n), spec=RequestSpec(Sampling(), StopRules(9)),
            route=Route(decode="d"), arrived_at=0.0,
        )
        for i in range(num_prompts * n)
    ]  # fmt: skip
    return Generation(requests, CallOutput(len(requests), whole=whole), num_prompts)


def test_text_that_came_meanwhile_leaves_in_one_piece() -> None:
    output = CallOutput(2, whole=False)
    output.deliver(1, "a", 1)
    output.deliver(0, "x", 1)
    output.deliver(1, "b", 1)
    output.deliver(1, "", 1)
    assert output.has_news
    assert output.take() == [Piece(1, "ab", None), Piece(0, "x", None)]
    assert output.take() == []
    output.deliver(0, "", 1)
    assert not output.has_news, "a token without text is no news to a client"
    last = end()
    output.deliver(1, "c", 1)
    output.end(1, last)
    assert output.take() == [Piece(1, "c", last)]
    assert output.samples[1].num_tokens == 4


def test_started_and_finished() -> None:
    output = CallOutput(2, whole=False)
    output.accepted(0)
    output.accepted(0)
    assert not output.is_started
    output.accepted(1)
    assert output.is_started
    output.end(0, end())
    assert not output.is_finished
    output.end(1, end())
    assert output.is_finished


def test_one_failure_finishes_the_call() -> None:
    output = CallOutput(2, whole=False)
    first, second = Failure("a", "a"), Failure("b", "b")
    output.end(0, end(None, first))
    assert output.is_finished
    output.end(1, end(None, second))
    assert output.failure == first


async def woken(output: CallOutput, act: Any) -> bool:
    waiting = asyncio.ensure_future(output.wait())
    await asyncio.sleep(0)
    act()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    done = waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    return done


@pytest.mark.parametrize(
    ("whole", "act", "wakes"),
    [
        (False, lambda output: output.deliver(0, "x", 1), True),
        (True, lambda output: output.deliver(0, "x", 1), False),
        (False, lambda output: output.deliver(0, "", 1), False),
        (False, lambda output: [output.accepted(0), output.accepted(1)], True),
        (False, lambda output: output.accepted(0), False),
        (True, lambda output: [output.accepted(0), output.accepted(1)], False),
        (False, lambda output: output.end(0, end()), True),
        (True, lambda output: output.end(0, end()), False),
        (True, lambda output: [output.end(0, end()), output.end(1, end())], True),
        (True, lambda output: output.end(0, end(None, Failure("a", "a"))), True),
        (True, lambda output: output.gone(), True),
        (False, lambda output: [output.gone(), output.gone()], True),
    ],
)
def test_what_wakes_the_writer(whole: bool, act: Any, wakes: bool) -> None:
    async def main() -> bool:
        output = CallOutput(2, whole=whole)
        return await woken(output, lambda: act(output))

    assert asyncio.run(main()) is wakes


async def test_news_from_before_are_not_waited_for() -> None:
    output = CallOutput(1, whole=False)
    output.deliver(0, "x", 1)
    await asyncio.wait_for(output.wait(), 1)
    output.take()
    output.gone()
    await asyncio.wait_for(output.wait(), 1)


async def test_what_is_written_through_wakes_nobody_while_the_client_keeps_up() -> None:
    output, written = CallOutput(2, whole=False), []
    keeps_up = True

    def write() -> bool:
        written.extend(output.take() if keeps_up else [])
        return keeps_up

    async def woken_by(*acts: Any) -> bool:
        return await woken(output, lambda: [*(act() for act in acts), output.flush()])

    output.write_through(write)
    output.deliver(0, "early", 1)
    output.flush()
    assert not written, "its writer is not there yet, or busy, and takes it"
    await asyncio.wait_for(output.wait(), 1)
    output.take()
    assert not await woken_by(lambda: output.deliver(0, "a", 1), lambda: output.deliver(1, "b", 1))
    assert not await woken_by(lambda: output.deliver(0, "c", 1), lambda: output.end(0, end()))
    assert written == [Piece(0, "a", None), Piece(1, "b", None), Piece(0, "c", end())]
    assert not await woken_by(), "nothing came"
    keeps_up = False
    assert await woken_by(lambda: output.deliver(1, "d", 1)), "it lags"
    assert output.take() == [Piece(1, "d", None)]
    keeps_up = True
    assert await woken_by(lambda: output.deliver(1, "e", 1), lambda: output.end(1, end())), "the end is the task's"
    assert output.take() == [Piece(1, "e", end())]
    assert len(written) == 3


async def test_what_writing_through_raises_is_the_writer_s() -> None:
    output = CallOutput(1, whole=False)

    def write() -> bool:
        raise ZeroDivisionError

    output.write_through(write)
    waiting = asyncio.ensure_future(output.wait())
    await asyncio.sleep(0)
    output.deliver(0, "x", 1)
    output.flush()
    with pytest.raises(ZeroDivisionError):
        await waiting


def test_usage_counts_each_prompt_once() -> None:
    made = generation(2, 2)
    for number in range(4):
        made.output.deliver(number, "x", 1 + number, number)
        assert usage_so_far(made, None, number).prompt_tokens_details.cached_tokens == number
        made.output.end(number, end(cached=number))
    usage = total_usage(made, None)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (21, 10, 31)
    assert usage.prompt_tokens_details.cached_tokens == 0 + 2
    so_far = usage_so_far(made, None, 3)
    assert (so_far.prompt_tokens, so_far.completion_tokens) == (11, 4)
    assert so_far.prompt_tokens_details.cached_tokens == 3


def answering(made: Generation, head: Head, **fields: Any) -> Answering:
    body = json.dumps({"prompt": "x", **fields}).encode()
    job = Validator(GatewayConfig(model_name="m", context_length=100)).text(body, "cmpl-1")
    return Answering(head, job, made, TokenDetails(job, made))


@pytest.mark.parametrize(("surface", "kind"), [(CHAT, "chat.completion"), (TEXT, "text_completion")])
def test_whole_responses_are_in_order(surface: Surface, kind: str) -> None:
    made = generation(1, 2, whole=True)
    made.output.deliver(1, "b", 1)
    made.output.deliver(0, "a", 1)
    for number in (1, 0):
        made.output.end(number, end("length"))
    head = Head(id="x", object=surface.chunk_object, created=1, model="m", system_fingerprint="f")
    answer: Any = surface.whole(answering(made, head))
    assert answer.object == kind
    texts = [choice.message.content if surface is CHAT else choice.text for choice in answer.choices]
    assert texts == ["a", "b"]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]


def event(data: bytes) -> Any:
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2, "one line, or a client loses the rest"
    return json.loads(data[6:])


COMMON = {"id": "x-1", "object": "o", "created": 7, "model": 'm"ü', "system_fingerprint": "fp"}


def test_chat_chunks() -> None:
    writer = CHAT.writer(answering(generation(1, 2), HEAD))
    start = [event(line + b"\n\n") for line in writer.start().split(b"\n\n") if line]
    assert [chunk["choices"][0]["index"] for chunk in start] == [0, 1]
    assert start[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    chunk = event(writer.text(1, 'a"\n\u2028', None, None))
    choice = {"index": 1, "delta": {"content": 'a"\n\u2028'}, "logprobs": None, "finish_reason": None}
    assert chunk == {**COMMON, "choices": [choice]}
    assert event(writer.text(0, "", end("stop"), None))["choices"][0]["finish_reason"] == "stop"


def test_text_chunks_with_usage() -> None:
    made = generation(1, 1)
    made.output.deliver(0, "x", 5)
    options = {"include_usage": True}
    writer = TEXT.writer(answering(made, HEAD, stream=True, stream_options=options))
    assert writer.start() == b""
    chunk = event(writer.text(0, "x", None, None))
    assert chunk == {
        **COMMON,
        "choices": [{"index": 0, "text": "x", "logprobs": None, "finish_reason": None}],
        "usage": None,
    }
    options |= {"continuous_usage_stats": True}
    counting = TEXT.writer(answering(made, HEAD, stream=True, stream_options=options))
    assert event(counting.text(0, "x", None, None))["usage"]["completion_tokens"] == 5
    last = event(writer.finish().removesuffix(DONE))
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 15)


def test_errors_are_events_too() -> None:
    error = event(CHAT.writer(answering(generation(1, 1), HEAD)).error(Internal("broke")))["error"]
    assert (error["message"], error["request_id"]) == ("broke", "x-1")
    assert DONE == b"data: [DONE]\n\n"


def test_a_sample_that_fails_before_its_prompt_was_read_is_news_without_text() -> None:
    output = CallOutput(2, whole=False, samples_per_read=2)
    output.deliver(1, "held", 1)
    assert not output.has_news
    failed = Failure("x", "it failed")
    output.end(1, end(None, failed))
    assert output.take() == [Piece(1, "", end(None, failed), None)]
    assert (output.is_finished, output.failure) == (True, failed)

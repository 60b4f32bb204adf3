"""The client of `meshctl bench`: what it reads of a stream, and each way a server can fail it, counted by kind."""

import asyncio
import itertools
import time

import pytest

from cli.bench import answer as reading
from cli.bench.answer import AnswerReader, Misdeed, Sample
from cli.bench.client import Server, encoded, get, stream
from cli.bench.loops import COMPLETIONS, closed_loop, open_loop
from cli.bench.summary import summarize
from mesh.testing.ports import free_port
from tests.cli.streaming import HEAD, USAGE, WHOLE, Answer, chunk, event, streaming, text

DONE = b"data: [DONE]\n\n"
COUNTED = event(choices=[], usage=USAGE)
REFUSED = b'HTTP/1.1 500 Oops\r\nContent-Length: 17\r\n\r\n{"error": "full"}'

FAILURES: dict[str, tuple[Answer, str, str]] = {
    "a status": ((REFUSED, "close"), "status 500", "full"),
    "a status without an end": ((b"HTTP/1.1 429 No\r\n\r\nslower", "close"), "status 429", "slower"),
    "a reset at once": ((b"", "reset"), "reset", ""),
    "a reset amid the stream": ((HEAD + chunk(text("a")), "reset"), "reset", ""),
    "no answer": ((b"", "close"), "ended_early", "without an answer"),
    "an early end": ((HEAD + chunk(text("a")), "close"), "ended_early", "after 1 events"),
    "an early end in good order": ((HEAD + chunk(text("a")) + chunk(b""), "close"), "ended_early", "after 1 events"),
    "no stream": ((b"HTTP/1.1 200 OK\r\n\r\n<html>", "close"), "ended_early", "<html>"),
    "silence": ((b"", "stall"), "timeout", "nothing came for 0.3 s"),
    "silence amid the stream": ((HEAD + chunk(text("a")), "stall"), "timeout", "nothing came for 0.3 s"),
    "an error in the stream": ((HEAD + chunk(event(error={"message": "lost"})), "close"), "error_event", "lost"),
    "no event": ((HEAD + chunk(b"data: {nonsense\n\n"), "close"), "garbled", "nonsense"),
    "an event of another kind": ((HEAD + chunk(event(choices=7)), "close"), "garbled", "choices"),
    "no HTTP": ((b"SSH-2.0-OpenSSH_9.2\r\n", "stall"), "garbled", "SSH-2.0"),
    "no usage": ((HEAD + chunk(text("a")) + chunk(DONE), "close"), "no_usage", "include_usage"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
async def test_what_a_server_does_wrong_has_a_kind(name: str) -> None:
    answer, kind, detail = FAILURES[name]
    async with streaming(lambda _: answer) as server:
        sample = Sample(time.perf_counter())
        await stream(Server.at(server.url), COMPLETIONS, encoded({"prompt": "x"}), sample, silence_s=0.3)
    assert (sample.failure, sample.is_whole) == (kind, False)
    assert detail in sample.detail
    assert sample.end_s > sample.start_s


async def test_nobody_there_and_a_name_that_is_none() -> None:
    for url in (f"http://127.0.0.1:{free_port()}", f"http://no-such-host.invalid:{free_port()}"):
        sample = Sample(time.perf_counter())
        await stream(Server.at(url), COMPLETIONS, b"{}", sample)
        assert sample.failure == "connect"
        assert sample.detail


async def test_a_stream_is_timed_by_event_and_counted_by_usage() -> None:
    async with streaming() as server:
        sample = Sample(time.perf_counter())
        await stream(Server.at(server.url), COMPLETIONS, encoded({"prompt": "x"}), sample)
    assert sample.is_whole
    assert len(sample.event_times_s) == 2
    assert (sample.num_tokens, sample.num_prompt_tokens, sample.num_cached_tokens) == (5, 8, 2)
    assert sample.start_s < sample.event_times_s[0] <= sample.end_s
    assert server.bodies == [{"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}]


async def test_a_server_that_leaves_the_stream_open_after_done_has_answered() -> None:
    async with streaming(lambda _: (WHOLE.removesuffix(chunk(b"")), "stall")) as server:
        sample = Sample(time.perf_counter())
        await stream(Server.at(server.url), COMPLETIONS, b"{}", sample, silence_s=30.0)
    assert sample.is_whole


async def test_a_loop_goes_on_after_failures_and_counts_them() -> None:
    kinds = itertools.cycle([(WHOLE, "close"), (REFUSED, "close"), (b"", "reset"), (HEAD, "close"), (b"", "stall")])
    async with streaming(lambda _: next(kinds)) as server:
        run = await closed_loop(Server.at(server.url), 4, 20, lambda n: {"prompt": str(n)}, silence_s=0.2)
    summary = summarize(run)
    assert (summary.num_requests, summary.num_whole, summary.num_output_tokens) == (20, 4, 20)
    assert summary.failures == {"status 500": 4, "reset": 4, "ended_early": 4, "timeout": 4}
    assert sorted(int(body["prompt"]) for body in server.bodies) == list(range(20))


async def test_what_comes_by_itself_does_not_wait_for_answers_and_is_timed_from_when_it_was_due() -> None:
    stalls = [(b"", "stall")] * 8
    async with streaming(lambda number: stalls[number] if number < 8 else (WHOLE, "close")) as server:
        began = time.perf_counter()
        due = [0.02 * number for number in range(10)]
        run = await open_loop(Server.at(server.url), due, lambda n: {"prompt": str(n)}, silence_s=1.0)
    starts = [sample.start_s - began for sample in run.samples]
    assert all(abs(start - at) < 0.05 for start, at in zip(starts, due, strict=True))
    assert [sample.failure for sample in run.samples] == ["timeout"] * 8 + [""] * 2
    assert run.samples[9].end_s - began < 1.0, "it waited for those that stall"


async def test_a_client_that_is_late_says_so_and_counts_it_into_the_latency() -> None:
    async def block() -> None:
        await asyncio.sleep(0.05)
        time.sleep(0.3)  # noqa: ASYNC251 - what a client that computes too much does

    async with streaming() as server:
        blocking = asyncio.create_task(block())
        run = await open_loop(Server.at(server.url), [0.1], lambda _: {})
        await blocking
    summary = summarize(run)
    assert run.late_s[0] > 0.2
    assert summary.ttft is not None
    assert summary.ttft.p50 > 200
    assert any("sent" in limit for limit in summary.client_limits)
    assert any("clock" in limit for limit in summary.client_limits)


async def test_open_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.bench.loops.MOST_OPEN", 2)
    async with streaming(lambda _: (b"", "stall")) as server:
        run = await open_loop(Server.at(server.url), [0.0] * 5, lambda _: {}, silence_s=0.3)
    summary = summarize(run)
    assert summary.failures == {"not_sent": 3, "timeout": 2}
    assert any("not sent" in limit for limit in summary.client_limits)


async def test_the_models_of_a_server_and_the_address_that_answered() -> None:
    async with streaming() as server:
        body, dialled = await get(Server.at(f"http://localhost:{server.port}/v1", key="secret"), "/v1/models", 5.0)
    assert b'"model"' in body
    assert dialled.address == "127.0.0.1"
    assert server.heads[0].startswith("GET /v1/models HTTP/1.1\r\n")
    assert "Authorization: Bearer secret" in server.heads[0]


def test_addresses() -> None:
    assert Server.at("https://example.org/openai/v1").url == "https://example.org:443/openai"
    assert Server.at("http://[::1]:8000").url == "http://[::1]:8000"
    for url in ("example.org", "ftp://example.org", "http://", "http://h:0", "http://h:99999", "http://h/?q"):
        with pytest.raises(ValueError, match=r"."):
            Server.at(url)


def test_events_in_any_pieces() -> None:
    whole = text("a") + b": a comment\n\nevent: x\n" + event(choices=[{"delta": {"content": "b"}}]) + COUNTED + DONE
    for size in (1, 7, len(whole)):
        sample = Sample(0.0)
        reader = AnswerReader(sample)
        for at in range(0, len(whole), size):
            reader.feed(whole[at : at + size], float(at + 1))
        reader.ended()
        assert (len(sample.event_times_s), sample.num_tokens, sample.is_whole) == (2, 5, True)


@pytest.mark.parametrize(
    ("choice", "counts"),
    [
        ({"text": ""}, False),
        ({"text": "a"}, True),
        ({"delta": {"role": "assistant", "content": ""}}, False),
        ({"delta": {"reasoning_content": "hm"}}, True),
        ({"delta": {"tool_calls": [{"index": 0}]}}, True),
        ({"delta": {}, "finish_reason": "stop"}, False),
    ],
)
def test_only_what_a_user_sees_is_an_event(choice: dict[str, object], counts: bool) -> None:
    sample = Sample(0.0)
    AnswerReader(sample).feed(event(choices=[choice]), 1.0)
    assert list(sample.event_times_s) == ([1.0] if counts else [])


def test_an_answer_without_an_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MAX_EVENTS", 3)
    reader = AnswerReader(Sample(0.0))
    with pytest.raises(Misdeed, match="endless"):
        reader.feed(text("a") * 4, 1.0)
    monkeypatch.setattr(reading, "_MAX_LINE_BYTES", 100)
    with pytest.raises(Misdeed, match="garbled"):
        AnswerReader(Sample(0.0)).feed(b"data: " + b"x" * 100, 1.0)


def test_an_answer_may_have_no_tokens_if_it_says_so() -> None:
    sample = Sample(0.0)
    AnswerReader(sample).feed(event(choices=[], usage={"completion_tokens": 0, "prompt_tokens": 1}) + DONE, 1.0)
    assert sample.is_whole

"""What goes wrong behind the gateway and in front of it, over real actor systems: pauses, not errors; and no leaks."""

import asyncio
import io
import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import structlog

from mesh.runtime.recording import Reader
from mesh.runtime.telemetry import setup_log
from mesh.testing.replay import read_failure, replay
from nodes import protocol, request
from nodes.gateway.http import connection as http_connection
from nodes.gateway.http.connection import HttpConnection
from nodes.gateway.jobs.validation import Validator
from nodes.gateway.requests import events
from nodes.gateway.requests.core import GatewayCore
from nodes.gateway.requests.log import RequestState
from nodes.protocol.records import FindCalls
from nodes.request import AttemptRef
from nodes.roles import DETOKENIZER, TOKENIZER
from tests.mesh.mesh_under_test import until
from tests.nodes.gateway.fake_ring import CONFIG, FakeScheduler, FakeTokenizer, Faults, Ring, Silent

PROMPT = "the quick brown fox"


async def complete(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 50} | fields)


async def text_of(client: httpx.AsyncClient, **fields: Any) -> str:
    response = await complete(client, **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


async def begun(ring: Ring, client: httpx.AsyncClient) -> asyncio.Task[str]:
    """An answer in the middle of which the scheduler is."""
    ring.faults.step_s = 0.01
    task = asyncio.ensure_future(text_of(client))
    await until(lambda: any(len(held.output_ids) > 5 for held in ring.scheduler.held.values()))
    return task


async def another(ring: Ring, actor_id: str, actor: Any) -> None:
    """One more of its role, of which the gateway knows."""
    await ring.start(actor_id, actor)
    await until(lambda: len(ring.gateway.ctx.members.by_role(actor.role)) == 2)


def error_of(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == code
    return error


async def test_a_failed_attempt_is_not_seen(ring, client) -> None:
    ring.faults.failing_attempts, ring.faults.fail_after = 1, 4
    answer = (await complete(client)).json()
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == (PROMPT, len(PROMPT) + 1)
    first, second = ring.seen.submits
    assert (second.attempt, second.output_ids) == (1, list(PROMPT[:4].encode()))
    assert (second.prompt_ids, second.spec) == (first.prompt_ids, first.spec)


async def test_a_priority_is_refused_where_a_scheduler_would_make_nothing_of_it(ring, client) -> None:
    assert (await complete(client, priority=-1)).status_code == 200
    await ring.start("d1", FakeScheduler(ring.faults, ring.seen), group="a", policy="fcfs")
    await until(lambda: len(ring.gateway.service.members()) == 7)
    error = error_of(await complete(client, priority=-1), 400, "unsupported_parameter")
    assert error["param"] == "priority"
    assert "'fcfs'" in error["message"]
    assert (await complete(client, priority=0)).status_code == 200


@pytest.mark.parametrize(("tokens_per_step", "num_lost"), [(1, 2), (100, 1)], ids=["a first one", "the last one"])
async def test_a_lost_batch_is_asked_for(ring, client, tokens_per_step: int, num_lost: int) -> None:
    ring.faults.tokens_per_step, ring.faults.drop_batches = tokens_per_step, num_lost
    assert await text_of(client) == PROMPT
    assert ring.seen.resends


async def test_a_killed_scheduler_is_replaced_in_the_middle_of_a_stream(ring, client) -> None:
    task = await begun(ring, client)
    await ring.kill("d0")
    await ring.start("d0", FakeScheduler(ring.faults, ring.seen), group="a")
    assert await task == PROMPT
    assert ring.seen.submits[-1].attempt >= 1


async def test_another_scheduler_takes_over(ring, client) -> None:
    await ring.start("d1", FakeScheduler(ring.faults, ring.seen), group="a")
    await until(lambda: len(ring.systems["tok0"].actor.ctx.members.by_role("scheduler")) == 2)
    task = await begun(ring, client)
    await ring.kill("d0")
    assert await task == PROMPT


async def test_a_killed_tokenizer_is_asked_no_more(ring, client) -> None:
    await another(ring, "tok1", FakeTokenizer(ring.faults, ring.seen))
    await ring.kill("tok0")
    for _ in range(4):
        assert await text_of(client) == PROMPT


@pytest.mark.settings(prepare_timeout_s=0.2)
async def test_a_tokenizer_that_hangs_costs_its_deadline_only(ring, client) -> None:
    await another(ring, "tok1", FakeTokenizer(Faults(prepare_silent=True), ring.seen))
    assert [await text_of(client) for _ in range(2)] == [PROMPT, PROMPT]


async def test_a_lost_detokenizer_makes_the_scheduler_use_another(ring, client) -> None:
    await another(ring, "t1", Silent(DETOKENIZER))
    task = await begun(ring, client)
    await ring.kill("t0")
    ring.gateway.on_peer_lost(ring.gateway.ctx.address._replace(actor_id="t0"), "as told")
    assert await task == PROMPT
    assert ring.seen.resends[-1].detokenizer == "t1"


@pytest.mark.parametrize("role", ["tok0", "d0"])
@pytest.mark.settings(recovery_timeout_s=0.5, role_wait_s=1.0)
async def test_a_missing_role_is_waited_for_and_then_503(ring, client, role: str) -> None:
    await ring.kill(role)
    await until(lambda: bool(ring.gateway.service.missing_roles()))
    response = await client.get("/health/ready")
    assert response.status_code == 503
    assert "is ready" in response.json()["reasons"][0]
    response = await complete(client)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    again = asyncio.ensure_future(text_of(client))
    await asyncio.sleep(0.05)
    actor = FakeTokenizer if role == "tok0" else FakeScheduler
    await ring.start(role, actor(ring.faults, ring.seen), group="a")
    assert await again == PROMPT, "it came back in time"


@pytest.mark.settings(max_attempts=2)
async def test_all_attempts_fail_before_the_first_token(ring, client) -> None:
    ring.faults.failing_attempts = 100
    assert "2 attempts" in error_of(await complete(client), 503, "worker_lost")["message"]


@pytest.mark.settings(max_attempts=2)
async def test_all_attempts_fail_in_the_middle_of_a_stream(ring, client) -> None:
    ring.faults.failing_attempts, ring.faults.fail_after = 100, 4
    response = await complete(client, stream=True)
    assert response.status_code == 200
    *chunks, last = [json.loads(line[6:]) for line in response.text.split("\n\n") if line]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == PROMPT[:4]
    assert last["error"]["code"] == "worker_lost"
    assert "[DONE]" not in response.text
    (told,) = ring.gateway.service.find_calls(FindCalls(last=1)).calls
    assert (told.status, told.code) == (200, "worker_lost")


async def test_an_unknown_field_is_logged_once_for_each_path(ring, client) -> None:
    with structlog.testing.capture_logs() as lines:
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})) * 2:
            assert (await client.post(path, json=body | {"best_model": 1})).status_code == 200
        assert (await complete(client, best_model=1)).status_code == 200
    logged = [(line["field"], line["path"]) for line in lines if line["event"] == "unknown_field"]
    assert logged == [("best_model", path) for path in ("/tokenize", "/detokenize", "/v1/completions")]


async def test_a_poisoned_request_is_our_fault_and_not_tried_again(ring, client) -> None:
    faults = ring.faults
    faults.failing_attempts, faults.fail_retryable, faults.fail_code = 1, False, "poisoned_request"
    with structlog.testing.capture_logs() as lines:
        error_of(await complete(client), 500, "poisoned_request")
    assert len(ring.seen.submits) == 1
    (line,) = [line for line in lines if line["event"] == "request_failed"]
    assert (line["status"], line["code"], line["path"]) == (500, "poisoned_request", "/v1/completions")


@pytest.mark.parametrize(("code", "status"), [("never_fits", 400), ("overloaded", 503)])
async def test_a_scheduler_that_refuses(ring, client, code: str, status: int) -> None:
    ring.faults.refuse_submits = code
    for stream in (False, True):
        response = await complete(client, stream=stream, n=2)
        error = error_of(response, status, "context_length_exceeded" if code == "never_fits" else code)
        assert error["param"] == ("prompt" if status == 400 else None)
        assert ("retry-after" in response.headers) == (status == 503)


@pytest.mark.parametrize(
    ("code", "retryable", "status"),
    [("template_error", False, 400), ("internal", False, 500), ("overloaded", True, 503), ("no_capacity", True, 503)],
)
async def test_a_tokenizer_that_refuses(ring, client, code: str, retryable: bool, status: int) -> None:
    ring.faults.tokenizer_error = (code, retryable)
    error = error_of(await complete(client), status, code)
    assert error["param"] == ("prompt" if status == 400 else None)
    error_of(await client.post("/detokenize", json={"tokens": [1]}), status, code)


@pytest.mark.settings(max_inflight=3)
async def test_a_gateway_full_of_requests_says_so(ring, client) -> None:
    ring.faults.step_s = 0.02
    first = asyncio.ensure_future(text_of(client, n=2))
    await until(lambda: ring.gateway.service.core.num_requests == 2)
    response = await complete(client, n=2)
    error_of(response, 429, "too_many_requests")
    assert response.headers["retry-after"] == "1"
    assert await text_of(client) == PROMPT, "one more has room"
    await first


@pytest.mark.settings(max_inflight=2, prepare_timeout_s=0.3, role_wait_s=0.1)
async def test_a_gateway_full_of_calls_says_so(ring, client) -> None:
    ring.faults.prepare_silent = True
    tasks = [asyncio.ensure_future(complete(client)) for _ in "ab"]
    await until(lambda: ring.gateway.service.door.num_calls == 2)
    error_of(await complete(client), 429, "too_many_requests")
    error_of(await client.post("/tokenize", json={"prompt": "x"}), 429, "too_many_requests")
    ring.faults.prepare_silent = False
    for task in tasks:
        error_of(await task, 503, "deadline_exceeded")


@pytest.mark.settings(max_buffered_bytes=500)
async def test_bodies_share_a_budget(ring, client) -> None:
    error_of(await complete(client, user="x" * 1000), 503, "service_unavailable")
    assert await text_of(client) == PROMPT


@pytest.mark.settings(request_timeout_s=0.3)
async def test_a_request_that_takes_too_long(ring, client) -> None:
    ring.faults.silent = True
    error_of(await complete(client), 504, "request_timeout")


def posted(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data


async def leave_after(ring: Ring, body: dict[str, Any], num_events: int, reached: Callable[[], bool]) -> None:
    """Send a request on a bare connection, read some of the answer, and close."""
    reader, writer = await asyncio.open_connection("127.0.0.1", ring.gateway.port)
    writer.write(posted(body))
    await until(reached)
    for _ in range(num_events):
        while not (await reader.readline()).startswith(b"data: "):
            pass
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_is_cancelled(ring, client, stream: bool, n: int) -> None:
    ring.faults.step_s = 0.005
    body = {"prompt": PROMPT, "max_tokens": 150, "ignore_eos": True, "stream": stream, "n": n}
    await leave_after(ring, body, 3 if stream else 0, lambda: len(ring.scheduler.held) == n)
    await until(lambda: not ring.scheduler.held, 0.5)
    request_ids = {submit.request_id for submit in ring.seen.submits}
    assert {AttemptRef(request_id, 0) for request_id in request_ids} == set(ring.seen.cancels)
    await until(lambda: ring.is_idle)
    assert ring.gateway.ctx.metrics.value("mesh_requests_ended_total", reason="abort") == n


async def test_a_client_that_leaves_with_requests_in_line_is_cancelled(ring, client) -> None:
    """Another request on the same connection, even one that cannot be read, must not hide the end of the first."""

    ring.faults.silent = True
    post = posted({"prompt": PROMPT})
    for rest in (post, post * 5, b"garbage\r\n\r\n"):
        _, writer = await asyncio.open_connection("127.0.0.1", ring.gateway.port)
        writer.write(post + rest)
        await until(lambda: len(ring.scheduler.held) == 1)
        writer.close()
        await writer.wait_closed()
        await until(lambda: ring.is_idle, 1.0)


async def test_a_client_that_reads_nothing_is_cut_off(ring, client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "READER_TIMEOUT_S", 0.2)

    server = ring.gateway.server
    # Small buffers, so that little is more than they hold; connections have those of the listening socket.
    server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", ring.gateway.port))
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 60)
        await until(lambda: server.num_connections)
        await until(lambda: not server.num_connections)
    assert await text_of(client) == PROMPT


async def test_a_client_that_leaves_while_its_prompt_is_prepared(ring, client) -> None:
    ring.faults.prepare_silent = True
    await leave_after(ring, {"prompt": PROMPT}, 0, lambda: ring.gateway.service.door.num_calls == 1)
    await until(lambda: ring.gateway.service.door.num_calls == 0, 0.5)


@pytest.mark.settings(body_timeout_s=30.0)
async def test_a_client_that_leaves_in_its_body(ring, client) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", ring.gateway.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    await until(lambda: ring.gateway.service.door.num_calls == 1)
    writer.close()
    await until(lambda: ring.gateway.service.door.num_calls == 0, 0.5)


class SlowReader(asyncio.Transport):
    """A connection whose client takes `num_pieces` at once, and then no more."""

    def __init__(self, protocol: Callable[[], Any], num_pieces: int) -> None:
        super().__init__()
        self.protocol = protocol
        self.num_left = num_pieces
        self.sent: list[bytes] = []
        self.tasks: list[asyncio.Task[Any] | None] = []

    def write(self, data: bytes) -> None:
        self.sent.append(data)
        self.tasks.append(asyncio.current_task())
        self.num_left -= 1
        if self.num_left == 0:
            self.protocol().pause_writing()

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0


@pytest.mark.parametrize("num_pieces", [2, 20, 1000])
async def test_a_slow_reader_holds_nobody_up(ring, client, num_pieces: int) -> None:
    """Its text waits in the gateway; its request ends at the scheduler before it has read any of it.

    What it takes at once goes to its connection as it comes, and no task of the call runs for it.
    """

    ring.faults.step_s = 0.001
    service = ring.gateway.service
    served = ring.gateway.server._served
    transport = SlowReader(lambda: protocol, num_pieces)
    protocol = HttpConnection(served, ("192.0.2.1", 4000))
    protocol.connection_made(transport)
    protocol.data_received(posted({"prompt": PROMPT, "max_tokens": 150, "ignore_eos": True, "stream": True}))
    (task,) = served.tasks
    await until(lambda: len(ring.seen.submits) == 1 and service.core.num_requests == 0)
    lags = num_pieces < 150
    num_sent = len(transport.sent)
    if lags:
        assert num_sent == num_pieces, "what it does not read waits here"
        assert await text_of(client) == PROMPT
        protocol.resume_writing()
    await task
    if lags:
        assert len(transport.sent) == num_sent + 2, "after the piece that waited, what came meanwhile leaves in one"
    # Its head, what came before it waited, and the end: what comes at once is written by who brings it.
    assert transport.tasks.count(task) <= 3 + lags
    pieces = b"".join(transport.sent).split(b"data: ")[1:]
    events = [json.loads(one.split(b"\n\n")[0]) for one in pieces if one.startswith(b"{")]
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text == (PROMPT * 10)[:150]
    protocol.connection_lost(None)


async def test_draining_finishes_what_is_here_and_takes_no_more(ring, client) -> None:
    task = await begun(ring, client)
    draining = asyncio.ensure_future(ring.gateway.drain())
    await asyncio.sleep(0)
    error_of(await complete(client), 503, "draining")
    response = await client.get("/health/ready")
    assert response.status_code == 503
    assert "draining" in response.json()["reasons"][0]
    assert not draining.done()
    assert await task == PROMPT
    await asyncio.wait_for(draining, 1)


async def test_a_fault_of_the_gateway_is_one_call_s(ring, client, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(ring.gateway.service, "open", broken)
        error_of(await complete(client), 500, "internal_error")
    with monkeypatch.context() as patch:
        patch.setattr("nodes.gateway.answers.sse.ChunkWriter.text", broken)
        response = await complete(client, stream=True)
        assert response.status_code == 200
        assert '"internal_error"' in response.text
    assert await text_of(client) == PROMPT
    assert ring.gateway.ctx.metrics.value("mesh_handler_errors_total", handler="http") == 2


async def test_a_tokenizer_that_does_not_serve_a_question_is_passed_over(ring, client) -> None:
    await another(ring, "tok1", Silent(TOKENIZER))
    for _ in range(4):
        assert await text_of(client) == PROMPT
    await ring.kill("tok0")
    await until(lambda: len(ring.gateway.ctx.members.by_role(TOKENIZER)) == 1)
    error = error_of(await complete(client), 500, "not_served")
    assert "does not answer Prepare" in error["message"]


def test_a_core_that_fails_ends_the_gateway_and_fails_again_from_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug in the field")

    async def main() -> None:
        async with Ring() as ring, httpx.AsyncClient(base_url=ring.url, verify=False) as client:
            setup_log(stream=log)
            monkeypatch.setattr(RequestState, "accept", broken)
            answer = asyncio.ensure_future(complete(client))
            assert "its core gateway failed" in await ring.systems["g0"].shutdown_asked()
            await ring.systems.pop("g0").stop()
            error_of(await answer, 503, "shutting_down")

    asyncio.run(main())
    assert str(list(PROMPT.encode()))[1:-1] not in log.getvalue(), "nobody reads prompts in a log"
    failure = read_failure(log.getvalue().splitlines())
    reader = Reader([events, protocol, request])
    with pytest.raises(ZeroDivisionError, match="a bug in the field"):
        replay(GatewayCore(failure.setup["gateway"], CONFIG).handle, failure, reader)
    monkeypatch.undo()
    replay(GatewayCore(failure.setup["gateway"], CONFIG).handle, failure, reader)


async def test_stopping_under_load_leaves_no_task() -> None:
    async with Ring() as ring, httpx.AsyncClient(base_url=ring.url, verify=False) as client:
        ring.faults.step_s = 0.05
        tasks = [asyncio.ensure_future(complete(client, stream=True, max_tokens=150, ignore_eos=True)) for _ in "abc"]
        await until(lambda: len(ring.scheduler.held) == 3)
        whole = asyncio.ensure_future(complete(client, max_tokens=150, ignore_eos=True))
        await until(lambda: len(ring.scheduler.held) == 4)
        ring.faults.prepare_silent = True
        waiting = asyncio.ensure_future(complete(client))
        await until(lambda: ring.systems["g0"].actor.service.door.num_calls == 5)
        await ring.systems.pop("g0").stop()
        for response in await asyncio.gather(*tasks):
            assert '"shutting_down"' in response.text
        error_of(await whole, 503, "shutting_down")
        error_of(await waiting, 503, "shutting_down")
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, left


STREAMED: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/completions": ({"prompt": PROMPT, "max_tokens": 150}, 'data: {"error":{'),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": PROMPT}]}, 'data: {"error":{'),
    "/v1/messages": (
        {"model": "bytes", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 150},
        'event: error\ndata: {"type":"error","error":{',
    ),
    "/v1/responses": ({"input": PROMPT, "store": False}, 'event: response.failed\ndata: {"type":"response.failed",'),
    "/generate": ({"text": PROMPT, "sampling_params": {"max_new_tokens": 150}}, 'data: {"error":{'),
}


@pytest.mark.parametrize("asks_usage", [False, True], ids=["", "usage asked for"])
async def test_streams_that_a_stop_cuts_off_end_with_the_error_of_their_surface(asks_usage: bool) -> None:
    async with Ring() as ring, httpx.AsyncClient(base_url=ring.url, verify=False) as client:
        ring.faults.step_s = 0.1
        bodies = {path: body | {"stream": True} for path, (body, _) in STREAMED.items()}
        of_openai = [path for path in bodies if path.endswith("completions")]
        for path in of_openai if asks_usage else ():
            bodies[path] |= {"stream_options": {"include_usage": True}}
        tasks = [asyncio.ensure_future(client.post(path, json=body)) for path, body in bodies.items()]
        await until(lambda: len(ring.scheduler.held) == len(tasks))
        await until(lambda: all(len(held.output_ids) > 2 for held in ring.scheduler.held.values()))
        await ring.systems.pop("g0").stop()
        for (path, (_, begins)), response in zip(STREAMED.items(), await asyncio.gather(*tasks), strict=True):
            *before, last = response.text.rstrip("\n").split("\n\n")
            assert last.startswith(begins), (path, last)
            if path in of_openai:
                usage = json.loads(before[-1].removeprefix("data: ")).get("usage")
                assert bool(usage and usage["completion_tokens"]) == asks_usage, before[-1]
            assert "shutting_down" in last or "shutting down" in last, (path, last)


async def test_without_http_a_simulation_drives_the_service() -> None:
    async with Ring(serve_http=False) as ring:
        service = ring.gateway.service
        job = Validator(CONFIG).text(json.dumps({"prompt": PROMPT, "max_tokens": 50}).encode(), "cmpl-sim")
        generation = service.open(
            job, await service.tokenizers.prepare(job.prepare, prompt_param="prompt"), service.now()
        )
        while not generation.output.is_finished:
            await generation.output.wait()
        (piece,) = generation.output.take()
        assert (piece.text, piece.end.finish_reason) == (PROMPT, "stop")

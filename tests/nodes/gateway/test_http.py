"""The HTTP surface over a real port: what is answered, and what is refused how."""

import gc
import json
import socket
import time
from collections.abc import Iterator
from typing import Any, cast

import httpx
import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from nodes.gateway.calls.observer import HttpObserver
from nodes.gateway.http import connection as http_connection
from nodes.gateway.page.feed import MeshFeed
from nodes.gateway.routes.app import GatewayApp
from nodes.gateway.shown.scrape import Scraper
from nodes.gateway.surfaces.vectors.routes import is_served
from tests.nodes.gateway.exposition import what_is_invalid


@pytest.fixture
def client(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=10, verify=False) as client:
        yield client
    deadline = time.monotonic() + 5
    while not served.is_idle:
        assert time.monotonic() < deadline, "something is held"
        time.sleep(0.01)


def completion(client: httpx.Client, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"model": "bytes", "prompt": "hello", "max_tokens": 5} | fields
    return client.post("/v1/completions", json=body, headers=headers)


def chat(client: httpx.Client, content: Any, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": content}]
    return client.post("/v1/chat/completions", json={"messages": messages} | fields)


def events(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_completion(client: httpx.Client) -> None:
    answer = completion(client, max_tokens=3).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "bytes"
    assert answer["system_fingerprint"].startswith("fp_")
    assert abs(answer["created"] - time.time()) < 60
    assert answer["choices"] == [{"index": 0, "text": "hel", "finish_reason": "length", "logprobs": None}]
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    details = {"prompt_tokens_details": {"cached_tokens": 2}, "completion_tokens_details": {"reasoning_tokens": 0}}
    assert answer["usage"] == usage | details


def test_a_chat(client: httpx.Client) -> None:
    answer = chat(client, "grüße").json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    message = {"role": "assistant", "content": "grüße", "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}]


def test_a_streamed_chat(client: httpx.Client) -> None:
    chunks = events(chat(client, "grüße", stream=True, stream_options={"include_usage": True}))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks[:-1])
    assert (text, chunks[-2]["choices"][0]["finish_reason"]) == ("grüße", "stop")
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 8)
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_streamed_completion_with_usage_all_along(client: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(completion(client, stream=True, stream_options=options))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "hello"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert (counts, counts[-1]) == (sorted(counts), 5)
    cached = {chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks}
    assert cached == {2}, "known from the first token on"


def test_a_streamed_chat_with_usage_from_the_first_chunk_on(client: httpx.Client) -> None:
    options = {"continuous_usage_stats": True}
    first, *rest = events(chat(client, "hello", n=2, stream=True, stream_options=options))
    counts = (first["usage"]["prompt_tokens"], first["usage"]["completion_tokens"], first["usage"]["total_tokens"])
    assert (first["choices"][0]["delta"]["role"], counts) == ("assistant", (5, 0, 5))
    assert all(chunk["usage"]["prompt_tokens"] == 5 for chunk in rest)


def test_a_call_leaves_nothing_to_the_garbage_collector(client: httpx.Client) -> None:
    calls = (
        lambda: events(completion(client, stream=True)),
        lambda: events(chat(client, "hello", stream=True, logprobs=True)),
        lambda: completion(client, n=2).json()["choices"],
        lambda: chat(client, "hello").json()["choices"],
        lambda: client.post("/v1/messages", json={"messages": [], "max_tokens": 0}).json()["error"],
        lambda: client.post("/v1/embeddings", json={"input": "hello"}).json(),
    )
    assert all(call() for call in calls), "what is imported and made once is there by now"
    gc.collect()
    gc.disable()
    try:
        assert all(call() for call in calls)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [type(one) for one in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    # As a cycle each call would keep what it has until a collection, and take part in all that come before.
    assert [one for one in left if one.__module__.startswith(("nodes.", "mesh."))] == []


def test_a_byte_order_mark_before_a_body_is_read(client: httpx.Client) -> None:
    body = b'\xef\xbb\xbf{"prompt": "hello", "max_tokens": 5}'
    answer = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.json()["choices"][0]["text"] == "hello"
    for nothing in (b"\xef\xbb\xbf", b"\xef\xbb", b"\xff\xfe{\x00}\x00"):
        refused = client.post("/v1/completions", content=nothing, headers={"content-type": "application/json"})
        assert refused.json()["error"]["code"] in ("invalid_json", "invalid_utf8")


def test_a_stream_without_usage(client: httpx.Client) -> None:
    assert all("usage" not in chunk for chunk in events(completion(client, stream=True)))


@pytest.mark.parametrize(
    ("prompt", "texts"), [(["abc", "xyz"], ["abc", "xyz"]), ([104, 105], ["hi"]), ([[104], [105, 106]], ["h", "ij"])]
)
def test_forms_of_prompts(client: httpx.Client, prompt: Any, texts: list[str]) -> None:
    answer = completion(client, prompt=prompt).json()
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))


def test_samples(client: httpx.Client) -> None:
    answer = completion(client, prompt=["abc", "xyz"], n=2, max_tokens=3, ignore_eos=True).json()
    assert [choice["text"] for choice in answer["choices"]] == ["abc", "bca", "xyz", "yzx"]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (6, 12)
    texts = [""] * 4
    for chunk in events(completion(client, prompt=["abc", "xyz"], n=2, max_tokens=3, ignore_eos=True, stream=True)):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["abc", "bca", "xyz", "yzx"]


def test_stop_strings(client: httpx.Client) -> None:
    answer = completion(client, prompt="one two three", stop=["three", "tw"], max_tokens=50).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("one ", "stop")


def test_sampling_reaches_the_scheduler(served: Any, client: httpx.Client) -> None:
    completion(client, temperature=0.5, top_k=4, seed=7, logit_bias={"65": -1}, min_tokens=2, priority=3)
    submit = served.seen.submits[-1]
    assert (submit.spec.sampling.temperature, submit.spec.sampling.top_k, submit.spec.sampling.seed) == (0.5, 4, 7)
    assert [asked.name for asked in submit.spec.sampling.asks] == ["logit_bias/1", "min_tokens/1"]
    assert (submit.spec.stop.min_tokens, submit.spec.priority, submit.detokenizer) == (2, 3, "t0")
    completion(client)
    completion(client)
    assert served.seen.submits[-1].spec.sampling.seed != served.seen.submits[-2].spec.sampling.seed


def test_models(client: httpx.Client) -> None:
    card, other = client.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"], card["object"]) == ("bytes", 200, "model")
    assert (card["quantization"], client.get("/v1/models/bytes").json()) == ("int8", card)
    assert client.get("/v1/models/other-bytes").json() == other == card | {"id": "other-bytes"}
    assert completion(client, model="other-bytes").json()["model"] == "bytes"
    answer = client.get("/v1/models/gpt/99")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_tokenize_and_back(client: httpx.Client) -> None:
    answer = client.post("/tokenize", json={"prompt": "hé"}).json()
    assert answer == {"count": 3, "max_model_len": 200, "tokens": [104, 195, 169], "token_strs": None}
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "hé"}
    messages = [{"role": "user", "content": "hi"}]
    assert client.post("/tokenize", json={"messages": messages}).json()["tokens"] == [104, 105]


def test_health(client: httpx.Client) -> None:
    assert client.get("/health/live").json() == {"status": "ok", "reasons": []}
    assert client.get("/health/ready").status_code == 200
    assert client.get("/version").json()["version"]


def test_metrics_show_the_whole_mesh(client: httpx.Client) -> None:
    completion(client, surprise=1)
    page = client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    assert what_is_invalid(page.text) == []
    samples = {
        (sample.name, sample.labels.get("actor")): sample.value
        for family in text_string_to_metric_families(page.text)
        for sample in family.samples
    }
    assert {actor for name, actor in samples if name == "mesh_actor_up"} == {"registry", "tok0", "d0", "w0", "t0", "g0"}
    assert samples[("vllm:num_requests_running", None)] == 0
    assert samples[("vllm:kv_cache_usage_perc", None)] == 0.25
    assert samples[("vllm:generation_tokens_total", "g0")] > 0
    assert samples[("vllm:time_to_first_token_seconds_count", "g0")] > 0
    assert samples[("mesh_scheduler_pages", "d0")] == 7
    assert samples[("mesh_http_unknown_fields_total", "g0")] > 0
    assert samples[("mesh_gateway_calls_inflight", "g0")] == 0


def test_openapi_describes_every_route(served: Any, client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    ctx, config = served.gateway.ctx, served.config
    feed = cast("MeshFeed", object())
    app = GatewayApp(served.gateway.service, Scraper(ctx, config), HttpObserver(ctx), feed=feed)
    ways = {path.replace(":path}", "}"): methods.keys() - {"HEAD"} for path, methods in app.routes.items()}
    routes = {(path, way) for path, methods in ways.items() for way in methods}
    assert ("/v1/models/{model_id}", "GET") in routes
    # What this model cannot do is answered, and not offered; the events are the page's own affair, and never end.
    routes = {(path, way) for path, way in routes if is_served(path, config)} - {("/events/mesh", "GET")}
    assert routes == {(path, way.upper()) for path, ways in document["paths"].items() for way in ways}
    schemas = document["components"]["schemas"]
    assert schemas["CompletionBody"]["properties"]["temperature"]
    references = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert references <= set(schemas)


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("field", ["rid", "request_id"])
def test_an_id_in_the_body_is_the_client_s_name_of_the_request(client: httpx.Client, field: str) -> None:
    said = completion(client, **{field: "mine-7\n\u00e9"})
    assert said.headers["x-request-id"] == "mine-7__"
    assert said.json()["id"] == said.headers["x-kvmesh-request-id"] != "mine-7"
    said = completion(client, {"X-Request-Id": "header"}, **{field: "body"})
    assert said.headers["x-request-id"] == "header"
    assert completion(client, stream=True, **{field: "streamed"}).headers["x-request-id"] == "streamed"
    assert completion(client, **{field: 7}).json()["error"]["param"] == field


def test_a_client_s_ids_are_echoed_and_ours_is_the_key(served: Any, client: httpx.Client) -> None:
    headers = {"X-Request-Id": "mine-2", "traceparent": TRACE}
    for path in ("/v1/models", "/nope", "/health/live"):
        said = client.get(path, headers=headers).headers
        assert (said["x-request-id"], said["traceparent"]) == ("mine-2", TRACE)
        assert said["x-kvmesh-request-id"].startswith("req-")
        said = client.get(path).headers
        assert said["x-request-id"] == said["x-kvmesh-request-id"]
        assert "traceparent" not in said
    ours: list[str] = []
    for changes in ({}, {"stream": True}, {}, {"prompt": 5}):
        answer = completion(client, headers, **changes)
        assert (answer.headers["x-request-id"], answer.headers["traceparent"]) == ("mine-2", TRACE)
        ours.append(answer.headers["x-kvmesh-request-id"])
        said = json.loads(answer.text.split("\n")[0].removeprefix("data: "))
        assert (said["error"]["request_id"] if "error" in said else said["id"]) == ours[-1]
    assert len(set(ours)) == 4, "two requests that a client calls alike are two requests"
    assert [submit.request_id for submit in served.seen.submits[-3:]] == [f"{one}-0" for one in ours[:3]]
    asked = served.seen.prepares
    client.post("/tokenize", json={"prompt": "x"}, headers=headers)
    assert asked[-1].request_id.startswith("req-")


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        ("x" * 5000, "x" * 128),
        ('a" level="error', "a__level=_error"),
        ("tab\there", "tab_here"),
        ("Root=1-67891233-abcdef;Parent=5", "Root=1-67891233-abcdef;Parent=5"),
        (b"\xe4\xf6x", "__x"),
        ("", None),
    ],
)
def test_what_a_client_calls_its_request_can_forge_nothing(client: httpx.Client, given: Any, echoed: str) -> None:
    said = client.get("/health/live", headers={"X-Request-Id": given, "traceparent": TRACE.upper()}).headers
    assert said["x-request-id"] == (echoed or said["x-kvmesh-request-id"])
    assert "traceparent" not in said


def test_a_client_s_ids_are_in_the_log_beside_ours(client: httpx.Client) -> None:
    with structlog.testing.capture_logs() as lines:
        answer = completion(client, {"X-Request-Id": "searched", "traceparent": TRACE})
    (line,) = [line for line in lines if line["event"] == "request"]
    assert (line["x_request_id"], line["traceparent"]) == ("searched", TRACE)
    assert line["request_id"] == answer.json()["id"]


def test_a_trace_that_is_none_is_said_to_whoever_looks(client: httpx.Client) -> None:
    with structlog.testing.capture_logs() as lines:
        answer = completion(client, {"traceparent": "00-12-34"})
    assert "traceparent" not in answer.headers
    (line,) = [line for line in lines if line["event"] == "traceparent_unread"]
    assert (line["log_level"], line["traceparent"], line["request_id"]) == ("debug", "00-12-34", answer.json()["id"])


def failures(lines: Any) -> list[Any]:
    return [line for line in lines if line["event"] == "request_failed"]


@pytest.mark.parametrize("sent", [{}, {"X-Request-Id": "searched", "traceparent": TRACE}])
def test_a_request_that_the_core_never_saw_has_one_line_of_its_failure(
    served: Any, client: httpx.Client, monkeypatch: pytest.MonkeyPatch, sent: dict[str, str]
) -> None:
    monkeypatch.setattr(served.gateway.service.door, "_turns_away", True)
    for path in ("/v1/completions", "/tokenize"):
        with structlog.testing.capture_logs() as lines:
            answer = client.post(path, json={"prompt": "x"}, headers=sent)
        refused(answer, 503, code="draining")
        (line,) = failures(lines)
        assert (line["log_level"], line["status"], line["code"], line["path"]) == ("warning", 503, "draining", path)
        assert line["request_id"] == answer.json()["error"]["request_id"]
        names = {"x_request_id": line.get("x_request_id"), "traceparent": line.get("traceparent")}
        assert names == {"x_request_id": sent.get("X-Request-Id"), "traceparent": sent.get("traceparent")}


def test_what_a_client_does_wrong_is_in_the_log_if_it_may_ask_for_it_by_a_name(client: httpx.Client) -> None:
    for path, code in (("/v1/completions", 400), ("/tokenize", 400), ("/v1/nope", 404)):
        for sent in ({}, {"X-Request-Id": "searched"}, {"traceparent": TRACE}):
            with structlog.testing.capture_logs() as lines:
                answer = client.post(path, content=b"{", headers=sent)
            assert answer.status_code == code
            said = [(line["log_level"], line["request_id"], line["path"]) for line in failures(lines)]
            assert said == [("info", answer.json()["error"]["request_id"], path)] * bool(sent)


def test_traces_go_on_into_the_mesh(served: Any, client: httpx.Client) -> None:
    trace = TRACE.split("-")[1]
    completion(client, {"traceparent": TRACE})
    assert trace in served.seen.traceparents[-1]
    completion(client, {"traceparent": "nonsense"})
    assert trace not in served.seen.traceparents[-1]
    assert "nonsense" not in served.seen.traceparents[-1]


def refused(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "request_id"}
    assert error["message"]
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code


def test_wrong_routes_and_methods(client: httpx.Client) -> None:
    refused(client.get("/nope"), 404, code="not_found")
    refused(client.post("/v1/images/generations", json={}), 404)
    answer = client.get("/v1/chat/completions")
    refused(answer, 405, code="method_not_allowed")
    assert answer.headers["allow"] == "POST"
    refused(client.delete("/v1/models"), 405)
    both = client.put("/v1/responses/resp_1")
    refused(both, 405)
    assert both.headers["allow"] == "DELETE, GET, HEAD", "two routes have this path"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"x":' * 10_000, b"[1]", b"\x00" * 100])
def test_bodies_that_are_no_json(client: httpx.Client, path: str, body: bytes) -> None:
    refused(client.post(path, content=body), 400)


def test_values(client: httpx.Client) -> None:
    refused(completion(client, temperature=-1), 400, "temperature")
    refused(completion(client, model="gpt-99"), 404, "model", "model_not_found")
    for value in (-1, 21, True, "2", 1.5):
        refused(completion(client, prompt_logprobs=value), 400, "prompt_logprobs")
        refused(chat(client, "a", prompt_logprobs=value), 400, "prompt_logprobs")
    refused(completion(client, prompt_logprobs=1, stream=True), 400, "prompt_logprobs")
    refused(chat(client, "a", echo=True), 400, "echo", "unsupported_parameter")
    refused(chat(client, "a", max_tokens=0), 400, "max_tokens")
    refused(completion(client, logprobs=21), 400, "logprobs")
    refused(completion(client, logprobs=1, logprob_token_ids=[257]), 400, "logprob_token_ids")
    refused(chat(client, "a", top_logprobs=5), 400, "top_logprobs")
    refused(completion(client, stream=True, max_tokens=0), 400, "max_tokens")
    refused(chat(client, 5), 400, "messages.0.content")


def test_prompts_that_do_not_fit(client: httpx.Client) -> None:
    refused(completion(client, prompt="x" * 200), 400, "prompt", "context_length_exceeded")
    refused(chat(client, "x" * 200, stream=True), 400, "messages", "context_length_exceeded")
    refused(completion(client, max_tokens=196), 400, "max_tokens", "context_length_exceeded")
    refused(completion(client, prompt=""), 400, "prompt")


def test_a_template_that_refuses(client: httpx.Client) -> None:
    refused(chat(client, "x", messages=[{"role": "bad", "content": "x"}]), 400, "messages", "template_error")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_content_type_other_than_json_is_415_with_a_hint(client: httpx.Client, path: str) -> None:
    for other in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x", "json"):
        answer = client.post(path, content=b"{}", headers={"Content-Type": other})
        refused(answer, 415, code="unsupported_media_type")
        assert other.partition(";")[0] in answer.json()["error"]["message"]
        assert "curl: -H 'Content-Type: application/json'" in answer.json()["error"]["message"]


def test_no_content_type_is_taken_as_json(client: httpx.Client) -> None:
    body = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()
    for kind in (None, "", "application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"):
        headers = {} if kind is None else {"Content-Type": kind}
        assert client.post("/v1/completions", content=body, headers=headers).status_code == 200, kind


def test_bodies_over_the_limit(client: httpx.Client) -> None:
    refused(completion(client, prompt="x" * 150_000), 413, code="body_too_large")

    def chunks() -> Iterator[bytes]:
        for _ in range(20):
            yield b"x" * 10_000

    refused(client.post("/v1/completions", content=chunks()), 413, code="body_too_large")
    refused(client.post("/v1/completions", content=b"x", headers={"Content-Encoding": "gzip"}), 415)
    assert completion(client).status_code == 200


def exchange(served: Any, data: bytes, *, wait_s: float = 5) -> bytes:
    with socket.create_connection(("127.0.0.1", served.gateway.port), timeout=wait_s) as connection:
        connection.sendall(data)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        return answer


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"


@pytest.mark.parametrize("closes", [True, False])
def test_a_refusal_goes_out_at_once_and_a_body_that_stalls_ends_its_connection(
    served: Any, monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    monkeypatch.setattr(http_connection, "LINGER_S", 0.5)
    head = HEAD if closes else HEAD.replace(b"Connection: close\r\n", b"")
    with socket.create_connection(("127.0.0.1", served.gateway.port), timeout=5) as connection:
        connection.sendall(head + b"Content-Length: 9000000\r\n\r\n{")
        answer, began = b"", time.monotonic()
        while not answer.endswith(b"}}"):
            chunk = connection.recv(65536)
            assert chunk
            answer += chunk
        answered = time.monotonic()
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert connection.recv(65536) == b"", "nothing more, and the end"
        assert time.monotonic() - answered > answered - began, "the wait is behind the answer"


def test_a_large_body_is_read_before_the_connection_closes(served: Any) -> None:
    """Otherwise the answer is lost: the client is still sending when it is reset."""
    answer = exchange(served, HEAD + b"Content-Length: 3000000\r\n\r\n" + b"x" * 3_000_000)
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_client_that_asks_first_is_answered_at_once(served: Any) -> None:
    answer = exchange(served, HEAD + b"Expect: 100-continue\r\nContent-Length: 3000000\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_body_that_does_not_come(served: Any) -> None:
    """Its connection is closed: it would be in the middle of that body for ever."""
    for head in (HEAD, HEAD.replace(b"Connection: close\r\n", b"")):
        began = time.monotonic()
        answer = exchange(served, head + b"Content-Length: 100\r\n\r\n{", wait_s=15)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - began < 10, "not only when the time between requests is over"


def test_a_body_that_nobody_asked_for_does_not_keep_its_connection(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "LINGER_S", 0.1)
    for path in (b"/health/live", b"/nope"):
        head = b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        assert exchange(served, head, wait_s=10).endswith(b"}")


def test_garbage_on_the_port(served: Any) -> None:
    for data in (b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 500):
        with socket.create_connection(("127.0.0.1", served.gateway.port), timeout=5) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(65536)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert httpx.get(served.url + "/health/live").status_code == 200

"""The HTTP surface over a real port: what is answered, and what is refused how."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families


@pytest.fixture
def client(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=10, verify=False) as client:
        yield client
    deadline = time.monotonic() + 5
    while not served.is_idle:
        assert time.monotonic() < deadline, "something is held"
        time.sleep(0.01)


def completion(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"model": "bytes", "prompt": "hello", "max_tokens": 5} | fields)


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
    assert answer["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 2}}


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
    assert text == "grüße"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_streamed_completion_with_usage_all_along(client: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(completion(client, stream=True, stream_options=options))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "hello"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_a_stream_without_usage(client: httpx.Client) -> None:
    assert all("usage" not in chunk for chunk in events(completion(client, stream=True)))


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (["abc", "xyz"], ["abc", "xyz"]),
        ([104, 105], ["hi"]),
        ([[104], [105, 106]], ["h", "ij"]),
    ],
)
def test_forms_of_prompts(client: httpx.Client, prompt: Any, texts: list[str]) -> None:
    answer = completion(client, prompt=prompt).json()
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))


def test_samples(client: httpx.Client) -> None:
    answer = completion(client, prompt=["abc", "xyz"], n=2, max_tokens=3, ignore_eos=True).json()
    assert [choice["text"] for choice in answer["choices"]] == ["abc", "bca", "xyz", "yzx"]
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 12
    chunks = events(completion(client, prompt=["abc", "xyz"], n=2, max_tokens=3, ignore_eos=True, stream=True))
    texts = [""] * 4
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["abc", "bca", "xyz", "yzx"]


def test_stop_strings(client: httpx.Client) -> None:
    answer = completion(client, prompt="one two three", stop=["three", "tw"], max_tokens=50).json()
    assert answer["choices"][0]["text"] == "one "
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_sampling_reaches_the_scheduler(served: Any, client: httpx.Client) -> None:
    completion(client, temperature=0.5, top_k=4, seed=7, logit_bias={"65": -1}, min_tokens=2, priority=3)
    submit = served.seen.submits[-1]
    assert (submit.sampling.temperature, submit.sampling.top_k, submit.sampling.seed) == (0.5, 4, 7)
    assert submit.sampling.logit_bias == {65: -1.0}
    assert (submit.stop.min_tokens, submit.priority, submit.detokenizer) == (2, 3, "t0")
    completion(client)
    completion(client)
    assert served.seen.submits[-1].sampling.seed != served.seen.submits[-2].sampling.seed


def test_models(client: httpx.Client) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"], card["object"]) == ("bytes", 200, "model")
    assert client.get("/v1/models/bytes").json() == card
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
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "bytes" in page.text
    assert "tok0" in page.text


def test_metrics_show_the_whole_mesh(client: httpx.Client) -> None:
    completion(client, surprise=1)
    page = client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    samples = {
        (sample.name, sample.labels.get("actor")): sample.value
        for family in text_string_to_metric_families(page.text)
        for sample in family.samples
    }
    assert {actor for name, actor in samples if name == "mesh_actor_up"} == {"registry", "tok0", "d0", "w0", "t0", "g0"}
    assert samples[("vllm:num_requests_running", None)] == 0
    assert samples[("vllm:kv_cache_usage_perc", None)] == 0.25
    assert samples[("vllm:generation_tokens_total", None)] > 0
    assert samples[("vllm:time_to_first_token_seconds_count", None)] > 0
    assert samples[("mesh_scheduler_pages", "d0")] == 7
    assert samples[("mesh_http_unknown_fields_total", "g0")] > 0
    assert samples[("mesh_gateway_calls_inflight", "g0")] == 0


def test_openapi_describes_every_route(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    for path in ("/v1/models", "/v1/chat/completions", "/v1/completions", "/tokenize", "/health/ready", "/metrics"):
        assert path in document["paths"]
    schemas = document["components"]["schemas"]
    assert schemas["CompletionBody"]["properties"]["temperature"]
    references = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert references <= set(schemas)


def test_ids_of_requests_are_echoed(client: httpx.Client) -> None:
    for path in ("/v1/models", "/nope", "/health/live"):
        assert client.get(path, headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
        assert client.get(path, headers={"X-Request-Id": "x" * 200}).headers["x-request-id"].startswith("req-")
    headers = {"X-Request-Id": "mine-2"}
    body = {"prompt": "x", "max_tokens": 1}
    assert client.post("/v1/completions", json=body, headers=headers).headers["x-request-id"] == "mine-2"
    body |= {"stream": True}
    assert client.post("/v1/completions", json=body, headers=headers).headers["x-request-id"] == "mine-2"
    body = {"prompt": 5}
    assert client.post("/v1/completions", json=body, headers=headers).headers["x-request-id"] == "mine-2"


def test_traces_go_on_into_the_mesh(served: Any, client: httpx.Client) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    body = {"prompt": "x", "max_tokens": 1}
    client.post("/v1/completions", json=body, headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
    assert trace in served.seen.traceparents[-1]
    client.post("/v1/completions", json=body, headers={"traceparent": "nonsense"})
    assert trace not in served.seen.traceparents[-1]
    assert "nonsense" not in served.seen.traceparents[-1]


def refused(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code


def test_wrong_routes_and_methods(client: httpx.Client) -> None:
    refused(client.get("/nope"), 404, code="not_found")
    refused(client.post("/v1/responses", json={}), 404)
    answer = client.get("/v1/chat/completions")
    refused(answer, 405, code="method_not_allowed")
    assert answer.headers["allow"] == "POST"
    refused(client.delete("/v1/models"), 405)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"x":' * 10_000, b"[1]", b"\x00" * 100])
def test_bodies_that_are_no_json(client: httpx.Client, path: str, body: bytes) -> None:
    refused(client.post(path, content=body), 400)


def test_values(client: httpx.Client) -> None:
    refused(completion(client, temperature=-1), 400, "temperature")
    refused(completion(client, model="gpt-99"), 404, "model", "model_not_found")
    refused(completion(client, logprobs=5), 400, "logprobs", "unsupported_parameter")
    refused(completion(client, stream=True, max_tokens=0), 400, "max_tokens")
    refused(chat(client, 5), 400, "messages.0.content")


def test_prompts_that_do_not_fit(client: httpx.Client) -> None:
    refused(completion(client, prompt="x" * 200), 400, "prompt", "context_length_exceeded")
    refused(chat(client, "x" * 200, stream=True), 400, "messages", "context_length_exceeded")
    refused(completion(client, max_tokens=196), 400, "max_tokens", "context_length_exceeded")
    refused(completion(client, prompt=""), 400, "prompt")


def test_a_template_that_refuses(client: httpx.Client) -> None:
    body = {"messages": [{"role": "bad", "content": "x"}]}
    refused(client.post("/v1/chat/completions", json=body), 400, "messages", "template_error")


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


def test_a_large_body_is_read_before_the_connection_closes(served: Any) -> None:
    """Otherwise the answer is lost: the client is still sending when it is reset."""
    answer = exchange(served, HEAD + b"Content-Length: 3000000\r\n\r\n" + b"x" * 3_000_000)
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_client_that_asks_first_is_answered_at_once(served: Any) -> None:
    answer = exchange(served, HEAD + b"Expect: 100-continue\r\nContent-Length: 3000000\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_body_that_does_not_come(served: Any) -> None:
    answer = exchange(served, HEAD + b"Content-Length: 100\r\n\r\n{", wait_s=15)
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_garbage_on_the_port(served: Any) -> None:
    for data in (b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 500):
        with socket.create_connection(("127.0.0.1", served.gateway.port), timeout=5) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(65536)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert httpx.get(served.url + "/health/live").status_code == 200

"""Requests with and without an API key, over HTTP, and how much each key may have at work."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from mesh.address import Address
from nodes.api_keys.entries import ApiKey, read_lines, sha256_of
from nodes.api_keys.file import write_key_file
from nodes.gateway.admission.key_use import KeyUse
from nodes.gateway.errors import TooManyRequests, Unauthorized
from nodes.gateway.http.authorization import Authorization
from nodes.gateway.routes.app import OPEN
from nodes.gateway.routes.openapi import OPERATIONS
from nodes.gateway.surfaces.vectors.routes import is_served
from tests.mesh.mesh_under_test import until
from tests.nodes.gateway.fake_ring import CONFIG, Ring, play
from tests.nodes.recording_context import RecordingContext

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
CONTROLLED = {"/flush_cache", "/release_memory_occupation", "/resume_memory_occupation"}
ALICE, BOB = {"authorization": "Bearer sk-alice"}, {"x-api-key": "sk-bob"}


def write_keys(path: Path, *lines: str) -> str:
    text = "\n".join(
        f"{name} {sha256_of(f'sk-{name}').hex()} {' '.join(rest)}" for name, *rest in map(str.split, lines)
    )
    write_key_file(path, read_lines(text))
    return str(path)


def with_keys(path: Path, test: Callable[[Ring, httpx.AsyncClient], Any], *lines: str, **settings: Any) -> list[Any]:
    """Play on a ring with these keys; what was logged."""
    with capture_logs() as logged:
        play(test, api_key_file=write_keys(path / "keys", *lines), **settings)
    return logged


def test_all_routes_but_those_of_health_and_metrics_want_a_key(tmp_path: Path) -> None:
    async def test(ring: Ring, client: httpx.AsyncClient) -> None:
        for operation in (one for one in OPERATIONS if is_served(one.path, CONFIG)):
            path = operation.path.replace("{model_id}", "bytes").replace("{response_id}", "resp_1")
            answer = await client.request(operation.method, path, json=operation.example)
            assert answer.status_code == (200 if path in OPEN else 401), path
            allowed = await client.request(operation.method, path, json=operation.example, headers=ALICE)
            # Of stored responses there is none, and whoever has a key may not change the mesh.
            status = 404 if "{response_id}" in operation.path else 403 if path in CONTROLLED else 200
            assert allowed.status_code == status, path
        assert len(OPEN) == 10
        for method, path in (("GET", "/nope"), ("POST", "/v1/models"), ("OPTIONS", "/v1/models")):
            assert (await client.request(method, path)).status_code == 401
            assert (await client.request(method, path, headers=ALICE)).status_code in (404, 405)

    with_keys(tmp_path, test, "alice", "bob")


def test_a_key_comes_in_either_header_and_a_refusal_says_how(tmp_path: Path) -> None:
    async def test(ring: Ring, client: httpx.AsyncClient) -> None:
        path = "/v1/chat/completions"
        wrong = {"authorization": "Bearer sk-wrong"}
        for headers in (ALICE, BOB, ALICE | BOB, wrong | BOB, {"authorization": "bearer  sk-alice"}):
            assert (await client.post(path, json=CHAT, headers=headers)).status_code == 200, headers
        for headers in (
            {}, wrong, {"x-api-key": "sk-alic"}, {"authorization": "Basic sk-alice"}, {"authorization": "sk-alice"},
            {"authorization": "Bearer"}, {"authorization": b"Bearer \xff\xfe"},
            {"x-api-key": sha256_of("sk-alice").hex()},
        ):  # fmt: skip
            answer = await client.post(path, json=CHAT, headers=headers)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (401, "invalid_api_key"), headers
            assert answer.headers["www-authenticate"] == "Bearer"
            assert error["request_id"] == answer.headers["x-kvmesh-request-id"]
        unread = await client.post(path, content=b"x" * 90_000, headers={"content-type": "application/json"})
        assert unread.status_code == 401, "before its body is read"

    logged = with_keys(tmp_path, test, "alice", "bob")
    assert [line["api_key"] for line in logged if line["event"] == "request"] == [
        "alice",
        "bob",
        "alice",
        "bob",
        "alice",
    ]
    assert "sk-" not in repr(logged)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_anthropics_clients_are_told_in_their_own_form(tmp_path: Path, path: str) -> None:
    body = {"model": "bytes", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}

    async def test(ring: Ring, client: httpx.AsyncClient) -> None:
        refused = await client.post(path, json=body, headers={"x-api-key": "sk-wrong"})
        assert (refused.status_code, refused.json()["type"]) == (401, "error")
        assert refused.json()["error"]["type"] == "authentication_error"
        assert (await client.post(path, json=body, headers={"x-api-key": "sk-alice"})).status_code == 200

    with_keys(tmp_path, test, "alice")


def test_a_preflight_needs_no_key(tmp_path: Path) -> None:
    page = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}

    async def test(ring: Ring, client: httpx.AsyncClient) -> None:
        answer = await client.options("/v1/completions", headers=page)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://chat.example")
        refused = await client.post("/v1/completions", json={"prompt": "x"}, headers={"Origin": page["Origin"]})
        assert refused.status_code == 401
        # Else a page could not tell why.
        assert refused.headers["access-control-allow-origin"] == "https://chat.example"

    with_keys(tmp_path, test, "alice", cors_origins=("https://chat.example",))


def test_a_file_that_changed_is_in_force_a_second_later(tmp_path: Path) -> None:
    async def test(ring: Ring, client: httpx.AsyncClient) -> None:
        async def asked(headers: dict[str, str]) -> int:
            return (await client.get("/v1/models", headers=headers)).status_code

        assert (await asked(ALICE), await asked(BOB)) == (200, 401)
        digest = ring.gateway.ctx.describe().attributes["api_keys"]
        write_keys(tmp_path / "keys", "bob")
        while await asked(ALICE) != 401:
            await asyncio.sleep(0.05)
        assert (await asked(ALICE), await asked(BOB)) == (401, 200)
        assert ring.gateway.ctx.describe().attributes["api_keys"] != digest
        (tmp_path / "keys").write_text("")
        await until(lambda: bool(ring.gateway.ctx.describe().attributes["api_keys_trouble"]))
        assert await asked(BOB) == 200

    logged = with_keys(tmp_path, test, "alice")
    told = [(line["log_level"], line["event"]) for line in logged if line["event"].startswith("api_keys")]
    assert told == [("info", "api_keys_read"), ("warning", "api_keys_unread")]
    assert [line["api_key"] for line in logged if line["event"] == "revoked_key"] == ["alice"], "once a minute"


def test_a_gateway_does_not_start_without_its_keys(tmp_path: Path) -> None:
    async def test(*_: object) -> None:
        raise AssertionError("it started")

    path = tmp_path / "keys"
    write_keys(path, "alice")
    path.chmod(0o644)
    with pytest.raises(Exception, match="chmod go-rwx"):
        play(test, api_key_file=str(path))


def test_ten_thousand_wrong_keys_are_refused_and_none_is_logged(tmp_path: Path) -> None:
    async def never(*_: object) -> None:
        raise AssertionError("nobody is asked")

    path = Path(write_keys(tmp_path / "keys", "alice"))
    with capture_logs() as logged:
        keys = Authorization(path, RecordingContext(Address("g0", 1), never))  # pyright: ignore[reportArgumentType]
        for number in range(10_000):
            with pytest.raises(Unauthorized) as refused:
                keys.key_of({b"authorization": b"Bearer sk-wrong-%d" % number})
            assert "sk-wrong" not in str(refused.value)
        assert keys.key_of({b"x-api-key": b"sk-alice"}).name == "alice"
    assert logged == []


def test_a_key_has_so_many_requests_at_work_and_no_more(tmp_path: Path) -> None:
    async def test(ring: Ring, client: httpx.AsyncClient) -> None:
        ring.faults.silent = True
        path, service = "/v1/chat/completions", ring.gateway.service
        running = [asyncio.ensure_future(client.post(path, json=CHAT, headers=ALICE)) for _ in range(2)]
        await until(lambda: len(ring.seen.submits) == 2)
        refused = await client.post(path, json=CHAT, headers=ALICE)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (429, "rate_limit_exceeded")
        assert error["message"] == "The API key 'alice' has 2 requests at work here; its limit is 2."
        assert refused.headers["retry-after"] == "1"
        assert (await client.post("/tokenize", json={"prompt": "x"}, headers=BOB)).status_code == 200
        ring.faults.silent = False
        ring.scheduler.wake()
        assert [(await one).status_code for one in running] == [200, 200]
        await until(lambda: not len(service.door.key_use))
        assert (await client.post(path, json=CHAT, headers=ALICE)).status_code == 200

    with_keys(tmp_path, test, "alice requests=2", "bob")


def test_a_key_has_so_many_tokens_at_work_and_no_more(tmp_path: Path) -> None:
    async def test(ring: Ring, client: httpx.AsyncClient) -> None:
        ring.faults.silent = True
        path = "/v1/completions"
        body = {"prompt": "x" * 20, "n": 3, "max_tokens": 8, "stream": True}

        async def asked(num_tokens: int) -> httpx.Response:
            return await client.post(path, json={"prompt": "y" * num_tokens, "max_tokens": 1}, headers=ALICE)

        running = asyncio.ensure_future(client.post(path, json=body, headers=ALICE))
        await until(lambda: len(ring.seen.submits) == 3)
        refused = await asked(11)
        assert refused.status_code == 429
        assert refused.json()["error"]["message"].startswith(
            "The API key 'alice' has 20 tokens at work here; its limit"
        )
        too_long = await asked(31)
        assert (too_long.status_code, too_long.headers.get("retry-after")) == (429, None)
        ring.faults.silent = False
        ring.scheduler.wake()
        assert (await running).status_code == 200
        await until(lambda: not len(ring.gateway.service.door.key_use))
        assert (await asked(30)).status_code == 200

    with_keys(tmp_path, test, "alice tokens=30")


def generation(*prompts: int, samples: int = 1, written: int = 0) -> Any:
    each = [length for length in prompts for _ in range(samples)]
    output = SimpleNamespace(samples=[SimpleNamespace(num_tokens=written) for _ in each])
    return SimpleNamespace(num_prompt_tokens=each, samples_per_prompt=samples, output=output)


@pytest.mark.parametrize(("num_gateways", "share"), [(1, 8), (2, 4), (3, 2), (8, 1), (64, 1)])
def test_each_gateway_grants_its_share_and_one_in_any_case(num_gateways: int, share: int) -> None:
    use, key = KeyUse(lambda: num_gateways, retry_after_s=1), ApiKey("alice", b"", requests=8)
    for _ in range(share):
        use.enter(key)
    use.enter(ApiKey("bob", b""))
    with pytest.raises(TooManyRequests, match=f"has {share} requests at work here; its limit is {share}"):
        use.enter(key)
    use.leave(key)
    use.enter(key)


def test_tokens_at_work_are_prompts_once_and_what_every_sample_wrote() -> None:
    use, key = KeyUse(lambda: 2, retry_after_s=1), ApiKey("alice", b"", tokens=100)
    use.enter(key)
    use.check_tokens(key, [[0] * 90])
    first = generation(10, 20, samples=2, written=3)
    use.begin(key, first)
    use.enter(key)
    use.check_tokens(key, [[0] * 8])
    with pytest.raises(TooManyRequests, match="42 tokens at work here; its limit is 50, of 100 over 2 gateways"):
        use.check_tokens(key, [[0] * 9])
    for sample in first.output.samples:
        sample.num_tokens = 100
    with pytest.raises(TooManyRequests):
        use.check_tokens(key, [[0]])
    use.end(key, first)
    use.check_tokens(key, [[0] * 100])
    use.leave(key)
    use.leave(key)
    assert len(use) == 0

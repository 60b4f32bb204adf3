"""SGLang's router, as published, before two meshes: what passes through it, what it asks of them, and how it chooses.

The meshes count what they cannot answer: a call of the router's to a path that is not there, or with a field that
nobody knows, fails the test whether or not the router goes on without.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from mesh.testing.ports import free_port
from tests.clients.environments import python_with
from tests.nodes.gateway.exposition import what_is_invalid
from tests.process.conftest import wait_until
from tests.serving.conftest import RunningMesh, start_mesh

pytestmark = [pytest.mark.process, pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(1800)]

ROUTER = "sglang-router==0.3.2"
TINY = ("--model", "tiny", "--pooling", "mean,normalize", "--prefill", "1", "--decode", "1")
SLOW = ("--model", "echo?step_ms=20", "--mixed", "1", "--context-length", "2048")
QUESTION = "What is the weather in Rome and what time is it in Paris?"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 60}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("weather", "time")]
GENERATE = {"text": "Bob has", "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
DOCUMENTS = ["Bob has 7 green pears.", "Ann has 4 red apples."]
RANKED = {"query": "Ann has 3 red apples.", "documents": DOCUMENTS}


class Router(NamedTuple):
    """One that runs, and what it says of itself."""

    url: str
    log: Path

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=30).raise_for_status().json()

    def post(self, path: str, **body: Any) -> Any:
        answer = httpx.post(self.url + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def streamed(self, **body: Any) -> str:
        return joined(self.url, **body)


def joined(url: str, **body: Any) -> str:
    """The text of a streamed chat, which has to end as one."""
    body = CHAT | body | {"stream": True}
    with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=120) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return python_with(tmp_path_factory.mktemp("router"), (ROUTER,))


def pair(tmp_path_factory: pytest.TempPathFactory, *options: str) -> Iterator[list[RunningMesh]]:
    with ExitStack() as stack:
        logs = [tmp_path_factory.mktemp("mesh") / "up.log" for _ in range(2)]
        yield [stack.enter_context(start_mesh(log, *options)) for log in logs]


@pytest.fixture(scope="module")
def meshes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningMesh]]:
    yield from pair(tmp_path_factory, *TINY)


@pytest.fixture(scope="module")
def slow_meshes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningMesh]]:
    yield from pair(tmp_path_factory, *SLOW)


@contextmanager
def routing(python: str, folder: Path, policy: str, urls: Sequence[str], *options: str) -> Iterator[Router]:
    """A router that looks at the health of its servers each second, and gives one up at the first failure."""
    port, log = free_port(), folder / f"{policy}.log"
    command = [
        python, "-m", "sglang_router.launch_router", "--worker-urls", *urls, "--policy", policy,
        "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()), "--log-level", "debug",
        "--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--health-success-threshold", "1",
        "--worker-startup-check-interval", "1", *options,
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    router = Router(f"http://127.0.0.1:{port}", log)

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            return router.get("/readiness")["healthy_workers"] == len(urls)
        except httpx.HTTPError:
            return False

    try:
        wait_until(is_ready, "the router has all its servers", 60.0)
        yield router
    finally:
        process.kill()
        process.wait(30)


def counted(mesh: RunningMesh, series: str, **labels: str) -> float:
    """The sum of a counter's samples that have these labels."""
    wanted = [f'{name}="{value}"' for name, value in labels.items()]
    samples = mesh.metrics().items()
    return sum(value for name, value in samples if name.startswith(series) and all(label in name for label in wanted))


def unanswered(meshes: Sequence[RunningMesh]) -> list[float]:
    """How often each was asked for a path that it has not, or for something with a field that it does not know."""
    return [
        counted(mesh, "mesh_http_requests_total", route="unknown") + counted(mesh, "mesh_http_unknown_fields_total")
        for mesh in meshes
    ]


def answered(meshes: Sequence[RunningMesh]) -> list[float]:
    """How many completions each has answered."""
    return [counted(mesh, "mesh_http_requests_total", route="/v1/completions", status="200") for mesh in meshes]


@pytest.mark.parametrize("policy", ["random", "round_robin", "cache_aware", "power_of_two"])
def test_what_passes(python: str, meshes: list[RunningMesh], tmp_path: Path, policy: str) -> None:
    url = meshes[0].url
    before = unanswered(meshes)
    with routing(python, tmp_path, policy, [mesh.url for mesh in meshes]) as router:
        said = httpx.post(url + "/v1/chat/completions", json=CHAT, timeout=60).json()["choices"][0]["message"]
        for fields in ({}, {"model": "tiny"}):
            # With none of them the router writes that it is unknown.
            assert router.post("/v1/chat/completions", **CHAT, **fields)["choices"][0]["message"] == said
            assert router.streamed(**fields) == said["content"] == joined(url)
            answer = router.post("/v1/responses", input=QUESTION, temperature=0, max_output_tokens=60, **fields)
            assert answer["output"][0]["content"][0]["text"] == said["content"]
            assert router.post("/v1/completions", model="tiny", prompt="Bob has", max_tokens=4)["model"] == "tiny"
        calls = router.post("/v1/chat/completions", **CHAT, tools=TOOLS)["choices"][0]["message"]["tool_calls"]
        assert [call["function"]["name"] for call in calls] == ["weather", "time"]
        alone = httpx.post(url + "/generate", json=GENERATE, timeout=60).json()
        assert router.post("/generate", **GENERATE)["output_ids"] == alone["output_ids"]
        vector = router.post("/v1/embeddings", model="tiny", input="Bob has")
        assert vector["data"] == httpx.post(url + "/v1/embeddings", json={"input": "Bob has"}).json()["data"]
        ranks = httpx.post(url + "/v1/rerank", json=RANKED, timeout=60).json()["results"]
        found = router.post("/v1/rerank", **RANKED)["results"]
        assert [(one["index"], one["document"]) for one in found] == [(1, DOCUMENTS[1]), (0, DOCUMENTS[0])]
        assert [one["score"] for one in found] == pytest.approx([one["relevance_score"] for one in ranks])
        classes = httpx.post(router.url + "/v1/classify", json={"model": "tiny", "input": "a"})
        assert (classes.status_code, classes.json()["error"]["code"]) == (400, "unsupported_model")
        assert router.get("/get_model_info")["served_model_name"] == "tiny"
        assert {one["metadata"]["dp_size"] for one in router.get("/workers")["workers"]} == {"1"}
        assert [one["load"] for one in router.get("/get_loads")["workers"]] == [0, 0]
        for method, path in (("POST", "/v1/responses/resp_1/cancel"), ("GET", "/v1/responses/resp_1")):
            missing = httpx.request(method, router.url + path)
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "response_not_found")
        # It adds to each sample whose it is.
        scraped = httpx.get(router.url + "/engine_metrics")
        assert scraped.status_code == 200
        assert what_is_invalid(scraped.text) == []
        assert all(f'worker_addr="{mesh.url}"' in scraped.text for mesh in meshes)
        flushed = httpx.post(router.url + "/flush_cache").json()
        assert {one["error"] for one in flushed["failed"]} == {"HTTP 403 Forbidden"}, "only with --control"
    assert unanswered(meshes) == before, "the router asked for something that is not there"


def test_ranks_of_data_that_it_believes_in(python: str, meshes: list[RunningMesh], tmp_path: Path) -> None:
    """With `--dp-aware` it takes every server apart into as many as that says it has ranks."""
    with routing(python, tmp_path, "round_robin", [mesh.url for mesh in meshes], "--dp-aware") as router:
        assert sorted(one["url"] for one in router.get("/workers")["workers"]) == sorted(
            f"{mesh.url}@0" for mesh in meshes
        )
        assert router.streamed() == joined(meshes[0].url)


def test_it_sends_to_who_has_less_to_do(python: str, slow_meshes: list[RunningMesh], tmp_path: Path) -> None:
    busy, idle = slow_meshes
    urls = [mesh.url for mesh in slow_meshes]
    asked = {"prompt": "x" * 400, "max_tokens": 1500, "ignore_eos": True}
    with routing(python, tmp_path, "power_of_two", urls) as router, ThreadPoolExecutor(4) as threads:
        # Half a minute of work, past the router: what it has sent itself it could count without asking.
        at_work = [threads.submit(httpx.post, busy.url + "/v1/completions", json=asked, timeout=120) for _ in range(4)]

        def loads() -> dict[str, int]:
            return {one["worker"]: one["load"] for one in router.get("/get_loads")["workers"]}

        wait_until(lambda: loads()[busy.url] >= 4 * 400, "the load is told", 30.0)
        assert loads()[idle.url] == 0
        # It asks each second by itself; of two more askings, one at least has begun since.
        asked_before = counted(busy, "mesh_http_requests_total", route="/get_load")
        wait_until(
            lambda: counted(busy, "mesh_http_requests_total", route="/get_load") >= asked_before + 2, "it asked", 30.0
        )
        before = answered(slow_meshes)
        for _ in range(12):
            router.post("/v1/completions", model="echo", prompt="Hello", max_tokens=2)
        assert not any(work.done() for work in at_work), "the load was gone before the end"
        assert [now - then for now, then in zip(answered(slow_meshes), before, strict=True)] == [0, 12]
        assert all(work.result().status_code == 200 for work in at_work)


def test_a_worker_dies_under_streams(python: str, meshes: list[RunningMesh], tmp_path: Path) -> None:
    alone = joined(meshes[0].url, max_tokens=400, ignore_eos=True)
    before = unanswered(meshes)
    with routing(python, tmp_path, "round_robin", [mesh.url for mesh in meshes]) as router:
        pids = [{one["actor_id"]: one["pid"] for one in mesh.ps()}["worker-decode-0"] for mesh in meshes]
        with ThreadPoolExecutor(6) as threads:
            streams = [threads.submit(router.streamed, max_tokens=400, ignore_eos=True) for _ in range(6)]
            for mesh, pid in zip(meshes, pids, strict=True):
                wait_until(lambda mesh=mesh: counted(mesh, "mesh_scheduler_num_running"), "it has streams")
                os.kill(pid, signal.SIGKILL)
            assert [stream.result() for stream in streams] == [alone] * 6
    assert unanswered(meshes) == before


def test_a_mesh_dies_and_is_there_again(python: str, meshes: list[RunningMesh], tmp_path: Path) -> None:
    with start_mesh(tmp_path / "up.log", *TINY) as third:
        urls = [meshes[0].url, third.url]
        with routing(python, tmp_path, "round_robin", urls) as router:

            def healthy() -> set[str]:
                return {one["url"] for one in router.get("/workers")["workers"] if one["is_healthy"]}

            os.kill(third.process.pid, signal.SIGKILL)
            third.process.wait(30)
            # At once: what comes to the dead one is sent again, to the other.
            alone = joined(meshes[0].url)
            for _ in range(6):
                assert router.post("/v1/chat/completions", **CHAT)["choices"][0]["message"]["content"] == alone
            wait_until(lambda: healthy() == {meshes[0].url}, "the dead one is given up", 30.0)
            with start_mesh(tmp_path / "again.log", *TINY, port=third.port):
                wait_until(lambda: healthy() == {*urls}, "it is taken again", 60.0)
                assert [router.streamed() for _ in range(4)] == [alone] * 4

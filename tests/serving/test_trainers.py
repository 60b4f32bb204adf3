"""What slime's and verl's adapters of SGLang send, to a whole mesh of two gateways that share a port.

Bodies, methods and order are those of `slime/backends/sglang_utils` and `verl/workers/rollout/sglang_rollout`. They
send no key; a proxy in front has to add it, as the sessions here do.
"""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cli.chaos.held import samples
from tests.serving.conftest import RunningMesh, start_mesh

# In CI the same routes are asked of a gateway among fakes (`test_control.py` and `test_aborts.py` in
# `tests/nodes/gateway`), and `tests/process/test_release.py` has a mesh give its memory back.
pytestmark = [pytest.mark.process, pytest.mark.slow]

ADMIN, ALICE = {"authorization": "Bearer sk-ops"}, {"authorization": "Bearer sk-alice"}
# As slime's `GenerateState` has them.
SAMPLING: dict[str, Any] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop": None, "stop_token_ids": None, "skip_special_tokens": False,
    "no_stop_trim": True, "spaces_between_special_tokens": False, "sampling_seed": 5,
}  # fmt: skip
PROMPT = list(b"Bob has 7 green pears. Ann has")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    log = tmp_path_factory.mktemp("mesh") / "up.log"
    os.environ["KVMESH_API_KEYS"] = "admin=ops:sk-ops,alice:sk-alice"
    try:
        with start_mesh(log, "--model", "tiny", "--gateways", "2", "--control") as running:
            yield running
    finally:
        del os.environ["KVMESH_API_KEYS"]


@pytest.fixture
def client(mesh: RunningMesh) -> Iterator[httpx.Client]:
    # A connection for each request: the kernel chooses a gateway for each connection.
    with httpx.Client(base_url=mesh.url, headers=ADMIN | {"connection": "close"}, timeout=60) as found:
        yield found


def flushed(client: httpx.Client) -> None:
    """Both of them send it again while requests are under way; here none is."""
    answer = client.get("/flush_cache")
    assert answer.status_code == 200, answer.text


def payload(tokens: int, **more: Any) -> dict[str, Any]:
    params = SAMPLING | {"max_new_tokens": tokens}
    return {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, **more}


def generated(client: httpx.Client, tokens: int, **more: Any) -> dict[str, Any]:
    answer = client.post("/generate", json=payload(tokens, **more))
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_slimes_engine(client: httpx.Client) -> None:
    info = client.get("/server_info").json()
    assert (int(info["tp_size"]), info["disaggregation_mode"]) == (1, "null")
    assert client.get("/health_generate").status_code == 200
    before = generated(client, 12)
    assert generated(client, 12)["meta_info"]["cached_tokens"] > 0
    # `release_memory_occupation` of its engine.
    flushed(client)
    assert generated(client, 1)["meta_info"]["cached_tokens"] == 0
    flushed(client)
    for _ in range(2):
        released = client.post("/release_memory_occupation", json={})
        assert released.status_code == 200, released.text
        assert {one["state"] for one in released.json()["groups"]} == {"released"}
    # With nothing in memory, nothing is cached either.
    flushed(client)
    for tags in (["weights"], ["kv_cache", "cuda_graph"]):
        assert client.post("/resume_memory_occupation", json={"tags": tags}).status_code == 200
    assert client.get("/get_weight_version").json()["weight_version"] == "default"
    after = generated(client, 12)
    assert (after["output_ids"], after["text"]) == (before["output_ids"], before["text"])


def test_right_after_an_answer_the_cache_is_flushed_and_memory_released_at_the_first_try(
    mesh: RunningMesh, client: httpx.Client
) -> None:
    handed_over = 'mesh_scheduler_handoffs_total{actor="scheduler-decode-0",outcome="done",role="scheduler"}'
    scrape = mesh.url + "/metrics"
    before = samples(httpx.get(scrape, headers=ADMIN).text)[handed_over]
    for number in range(30):
        # Long enough to be prefilled elsewhere. Every third one ends by a string, and its scheduler is told so later.
        prompt = f"{number} {number * 31} " + "a word and " * 60
        body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "stop": "e" if number % 3 == 2 else None}
        answer = client.post("/v1/completions", json=body | {"stream": number % 2 == 1})
        assert answer.status_code == 200, answer.text
        flushed = client.post("/flush_cache")
        assert flushed.status_code == 200, (number, flushed.text)
    assert samples(httpx.get(scrape, headers=ADMIN).text)[handed_over] - before >= 30
    generated(client, 12)
    assert client.post("/release_memory_occupation", json={}).status_code == 200
    assert client.post("/resume_memory_occupation", json={}).status_code == 200


def test_verls_adapter(client: httpx.Client) -> None:
    assert client.post("/abort_request", json={"rid": "", "abort_all": False}).json() == {}
    assert client.post("/release_memory_occupation", json={"tags": ["kv_cache", "weights"]}).status_code == 200
    assert client.post("/resume_memory_occupation", json={"tags": ["weights"]}).status_code == 200
    # In between it updates weights, which cannot be done yet.
    tensors = {"serialized_named_tensors": [], "load_format": None, "flush_cache": False}
    for path in ("update_weights_from_tensor", "pause_generation", "continue_generation", "init_weights_update_group"):
        answer = client.post(f"/{path}", json=tensors)
        assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_implemented")
        assert path in answer.json()["error"]["message"]
    assert client.post("/resume_memory_occupation", json={"tags": ["kv_cache"]}).status_code == 200
    flushed(client)
    assert len(generated(client, 3)["output_ids"]) == 3


def test_what_only_an_admin_may(mesh: RunningMesh) -> None:
    for path in ("/flush_cache", "/release_memory_occupation"):
        assert httpx.get(mesh.url + path).status_code == 401
        assert httpx.get(mesh.url + path, headers=ALICE).status_code == 403


def of_trainer(answer: dict[str, Any]) -> list[int]:
    """As slime takes an answer apart; it insists on a logprob for each token."""
    entries = answer["meta_info"]["output_token_logprobs"]
    assert all(isinstance(entry[0], float) for entry in entries)
    assert [entry[1] for entry in entries] == answer["output_ids"]
    return answer["output_ids"]


async def load(client: httpx.AsyncClient) -> dict[str, int]:
    return (await client.get("/v1/loads?include=core")).json()["loads"][0]


async def sample(client: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Event) -> dict[str, Any]:
    """Its answer; of a stream, whose events are cumulative, the last. `begun` is set when one has a token."""
    answer: dict[str, Any] = {}
    async with client.stream("POST", "/generate", json=body) as response:
        assert response.status_code == 200
        if not body["stream"]:
            return json.loads(await response.aread())
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                answer = json.loads(line.removeprefix("data: "))
                if answer["output_ids"]:
                    begun.set()
    return answer


async def rollout(mesh: RunningMesh, victim: str) -> list[dict[str, Any]]:
    """Eight samples by way of both gateways, aborted amid their output as slime does; with a victim, that one dies.

    One is streamed, which shows that there is output: those that run may still be without on a busy machine.
    """
    limits = httpx.Limits(max_keepalive_connections=0)
    async with (
        httpx.AsyncClient(base_url=mesh.url, headers=ADMIN, timeout=60, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        bodies = [payload(900, rid=f"s{number}", stream=number == 7) for number in range(8)]
        for number, body in enumerate(bodies):
            body["sampling_params"]["sampling_seed"] = number
            body["sampling_params"]["ignore_eos"] = True
        begun = asyncio.Event()
        samples = [group.create_task(sample(client, body, begun)) for body in bodies]
        await begun.wait()
        while (await load(client))["num_running_reqs"] < len(bodies):
            assert not any(one.done() for one in samples)
            await asyncio.sleep(0.02)
        # One by its name, at whichever gateway that is.
        for body in ({"rid": "s0"}, {"rid": "s0"}):
            assert (await client.post("/abort_request", json=body)).status_code == 200
        first = await samples[0]
        if victim:
            (pid,) = (one["pid"] for one in mesh.ps() if one["actor_id"] == victim)
            os.kill(pid, signal.SIGKILL)
        while True:
            assert (await client.post("/abort_request", json={"abort_all": True})).status_code == 200
            if not (await load(client))["num_total_reqs"]:
                break
            await asyncio.sleep(0.1)
        assert first["meta_info"]["id"] == "s0"
        return [await one for one in samples]


@pytest.mark.parametrize("victim", ["", "worker-decode-0"])
def test_a_rollout_that_is_aborted_goes_on_where_it_was(mesh: RunningMesh, client: httpx.Client, victim: str) -> None:
    answers = asyncio.run(rollout(mesh, victim))
    for answer in answers:
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(of_trainer(answer)) < 900
    # What they had are the first tokens of what each would have had.
    number, partial = max(enumerate(answers), key=lambda one: len(one[1]["output_ids"]))
    tokens = of_trainer(partial)
    assert tokens
    body = payload(len(tokens), rid="again")
    body["sampling_params"]["sampling_seed"] = number
    body["sampling_params"]["ignore_eos"] = True
    whole = client.post("/generate", json=body).json()
    assert whole["output_ids"] == tokens
    assert whole["text"].startswith(partial["text"])
    flushed(client)

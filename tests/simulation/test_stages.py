"""The actors that a request passes say where its time went, and it adds up, over a whole mesh on virtual time."""

import asyncio
import json

import pytest
from structlog.testing import capture_logs

from mesh.simulation.faults import Faults
from mesh.simulation.virtual_time import run
from nodes.gateway.config import GatewayConfig
from nodes.gateway.local import LocalGateway
from tests.simulation.scenario import LIMIT_S
from tests.simulation.whole_mesh import CONTEXT_LENGTH, SimulatedMesh

SLOW = GatewayConfig(model_name="echo", model="echo", context_length=CONTEXT_LENGTH, slow_request_s=0.001)
STAGES = ("tokenize_s", "queue_s", "grant_s", "prefill_s", "transfer_s")


@pytest.mark.parametrize("mixed", [False, True])
def test_stages_are_counted_and_add_up_to_the_first_token(mixed: bool) -> None:
    mesh = SimulatedMesh(1, Faults(), mixed, "")
    mesh.makers["gateway-0"] = lambda: LocalGateway(SLOW)

    async def scenario() -> None:
        await mesh.start()
        prompts = (chr(ord("a") + number) * 200 for number in range(5))
        bodies = [json.dumps({"prompt": prompt, "max_tokens": 20}).encode() for prompt in prompts]
        outcomes = await asyncio.gather(*(mesh.request(body, f"cmpl-{n}") for n, body in enumerate(bodies)))
        assert all(outcome.num_ends == 1 for of_call in outcomes for outcome in of_call)
        await mesh.settle()

    with capture_logs() as lines:
        try:
            run(scenario(), limit_s=LIMIT_S)
        finally:
            mesh.bury()
    slow = [line for line in lines if line["event"] == "slow_request"]
    assert sorted(line["request_id"] for line in slow) == [f"cmpl-{number}-0" for number in range(5)]
    for line in slow:
        assert 0 < sum(line[stage] for stage in STAGES) <= line["first_token_s"] <= line["elapsed_s"], line
        assert 0 < line["stall_s"] < line["elapsed_s"]
        assert (line["grant_s"] > 0) == (not mixed)
        assert line["prefill_s"] > 0
        assert line["attempts"] == 1
    assert any(line["queue_s"] > 0 for line in slow), "five prompts are more than one step takes"
    decode = mesh.systems[f"scheduler-{mesh.groups[-1]}"].metrics.snapshot().histograms
    names = ["queue", "prefill"] if mixed else ["queue", "prefill", "grant", "transfer"]
    assert {name: sum(decode[f"mesh_request_{name}_seconds"].counts) for name in names} == dict.fromkeys(names, 5)
    gateway = mesh.systems["gateway-0"].metrics.snapshot().histograms
    assert sum(gateway["mesh_request_stall_seconds"].counts) == 5
    tokenizer = mesh.systems["tokenizer-0"].metrics.snapshot().histograms
    assert sum(tokenizer["mesh_request_tokenize_seconds"].counts) == 5

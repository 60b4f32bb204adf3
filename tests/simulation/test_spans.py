"""A delay planted anywhere on a request's way is found by its timeline, in a whole mesh on virtual time."""

import asyncio
import json
from collections import Counter

import pytest

from mesh.simulation.faults import Faults
from mesh.simulation.virtual_time import run
from nodes.call_spans import sample_spans
from nodes.protocol.records import CallRecord, FindCalls
from tests.simulation.scenario import LIMIT_S
from tests.simulation.whole_mesh import SimulatedMesh

DELAY_S = 0.6
"""Less than the second of silence after which a gateway asks again, and than three heartbeats."""
GATEWAY, TOKENIZER, AGENT = ["gateway-0"], ["tokenizer-0"], ["kv-agent-0"]
DECODE, PREFILL = ["scheduler-decode-0"], ["scheduler-prefill-0"]
DETOKENIZERS = ["detokenizer-0", "detokenizer-1"]
HOPS = {
    "to the tokenizer": (GATEWAY, TOKENIZER, "tokenizer's way"),
    "from the tokenizer": (TOKENIZER, GATEWAY, "tokenizer's way"),
    "to the decode scheduler": (GATEWAY, DECODE, "submit"),
    "for pages": (DECODE, AGENT, "grant"),
    "with pages": (AGENT, DECODE, "grant"),
    "for a prefill": (DECODE, PREFILL, "ways"),
    "to the prefill worker": (PREFILL, ["worker-prefill-0"], "prefill"),
    "from the prefill worker": (["worker-prefill-0"], PREFILL, "prefill"),
    "of the first token": (PREFILL, DECODE, "ways"),
    "of finished pages": (PREFILL, AGENT, "transfer"),
    "to the detokenizer": (DECODE, DETOKENIZERS, "ways"),
    "from the detokenizer": (DETOKENIZERS, GATEWAY, "ways"),
}
DEATHS = {
    "worker-prefill-0": (0, "prefill"),
    "worker-decode-0": (15, "stall"),
    # No pace is known by then, or that of a pipeline that fills.
    "worker-decode-0 ": (1, "stall"),
    "worker-decode-0  ": (2, "stall"),
    "scheduler-decode-0": (15, "retry"),
}
"""Who dies, after how many tokens (0: when the request comes), and where that time is found."""


def calls(mesh: SimulatedMesh) -> list[CallRecord]:
    return mesh.actors["gateway-0"].service.find_calls(FindCalls(name="cmpl-0")).calls


def num_tokens(mesh: SimulatedMesh) -> int:
    """What has come of the request; 0 before it has a record."""
    return max((call.output_tokens for call in calls(mesh)), default=0)


def traced(seed: int, disturb: str = "") -> Counter[str]:
    """A request of a mesh, and how long each of its spans took."""
    mesh = SimulatedMesh(seed, Faults(), False, "")
    # Steps long enough that output is under way when somebody dies, and returns long enough to be seen.
    mesh.speeds = mesh.speeds._replace(
        step_ms=dict.fromkeys(mesh.groups, 30), copy_s=0.0005, restart_s=(0.5, 0.9), prefill_restart_s=(0.5, 0.9)
    )
    found: list[CallRecord] = []

    async def scenario() -> None:
        await mesh.start()
        # No deaths and hangs but the planted one.
        mesh.moments.end()
        mesh.devices.end()
        # Links are made before anything is measured.
        await mesh.request(json.dumps({"prompt": "b" * 200, "max_tokens": 8}).encode(), "warm")
        await asyncio.sleep(1.0)
        if disturb in HOPS:
            left, right, _ = HOPS[disturb]
            mesh.network.cut(left, right, duration_s=DELAY_S, hold=True, one_way=True)
        body = json.dumps({"prompt": "a" * 200, "max_tokens": 40}).encode()
        asked = asyncio.ensure_future(mesh.request(body, "cmpl-0"))
        if disturb in DEATHS:
            await asyncio.sleep(0.0)
            while num_tokens(mesh) < DEATHS[disturb][0]:
                await asyncio.sleep(0.001)
            mesh.processes[disturb.strip()].kill()
        await asked
        found.extend(calls(mesh))
        await mesh.settle()
        await mesh.stop()
        mesh.bury()

    run(scenario(), limit_s=LIMIT_S)
    (call,) = found
    took = Counter[str]()
    for span in sample_spans(call, call.samples[0]):
        took[span.name] += span.took_s
    return took


def look(seed: int) -> None:
    usual = traced(seed)
    for disturb in [*HOPS, *DEATHS]:
        took = traced(seed, disturb)
        more = Counter({name: took[name] - usual[name] for name in {*took, *usual}})
        span = HOPS[disturb][2] if disturb in HOPS else DEATHS[disturb][1]
        ((longest, late_s), *_) = more.most_common(1)
        assert longest == span, f"{disturb}, seed {seed}: {more}"
        # What comes later in the request's way is reached while the hop is held, and lets less of it be seen.
        assert 0.3 < late_s < DELAY_S + 0.4, f"{disturb}, seed {seed}: {more}"
        # Nothing else is longer for it, but by what a step or two more make.
        others_s = sum(more.values()) - late_s
        assert others_s < 0.1, f"{disturb}, seed {seed}: {more}"


def test_a_late_message_and_a_death_are_in_the_span_that_is_theirs() -> None:
    look(0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 15))
def test_they_are_in_any_mesh(seed: int) -> None:
    look(seed)

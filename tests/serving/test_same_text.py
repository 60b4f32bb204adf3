"""The same text, whatever the mesh looks like: together or apart, cached or not, chunked or not, alone or in a crowd.

Sampled at temperature 1 with fixed seeds, so that one bit of difference in a logit would show sooner or later.
"""

import concurrent.futures
from typing import Any

import pytest

from tests.serving.conftest import APART, MIXED

pytestmark = pytest.mark.process

SMALL_CHUNKS = (*APART, "--chunk", "16")

LONG = "Bob has 7 green pears. Ann has 3 red apples. The sky is blue and the grass is green. " * 4
PROMPTS = [f"{number} {LONG[: 40 + 35 * number]}" for number in range(16)]


def draw(mesh: Any, number: int) -> str:
    """One sampled completion; half of them greedy."""
    body = {
        "model": "tiny",
        "prompt": PROMPTS[number],
        "seed": number,
        "temperature": float(number % 2),
        "top_p": 0.95,
        "max_tokens": 40,
        "ignore_eos": True,
    }
    status, answer = mesh.post("/v1/completions", body)
    assert status == 200, answer
    return answer["choices"][0]["text"]


def in_a_crowd(mesh: Any) -> list[str]:
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda number: draw(mesh, number), range(len(PROMPTS))))


def test_topology_chunks_cache_and_company_do_not_show(mesh_of: Any) -> None:
    mixed = mesh_of(*MIXED)
    alone = [draw(mixed, number) for number in range(len(PROMPTS))]
    assert len(set(alone)) > len(PROMPTS) // 2, "texts that are all alike prove nothing"
    assert in_a_crowd(mixed) == alone, "cached, and sixteen at a time"
    apart = mesh_of(*APART)
    assert in_a_crowd(apart) == alone, "prefill and decode apart"
    assert in_a_crowd(apart) == alone, "apart and cached"
    apart.pages_moved(len(PROMPTS))
    assert in_a_crowd(mesh_of(*SMALL_CHUNKS)) == alone, "chunks of one page"

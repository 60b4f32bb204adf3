"""Where the cached tokens of a prompt of /generate were, as SGLang says it."""

from typing import Any

import httpx
import pytest

from nodes.gateway.surfaces.generate.answer import cached_details
from tests.nodes.gateway.test_aborts import generating


@pytest.mark.parametrize(
    ("counts", "details"),
    [
        ((0, 0), None),
        ((32, 0), {"device": 32, "host": 0}),
        ((32, 16), {"device": 16, "host": 0, "storage": 16, "storage_backend": "disk"}),
        ((32, 32), {"device": 0, "host": 0, "storage": 32, "storage_backend": "disk"}),
    ],
)
def test_tiers_add_up_to_what_was_cached(counts: tuple[int, int], details: dict[str, Any] | None) -> None:
    assert cached_details(*counts) == details


@pytest.mark.parametrize("asked", [{}, {"return_cached_tokens_details": True}, {"return_cached_tokens_details": False}])
async def test_every_answer_of_generate_has_them(ring: Any, client: httpx.AsyncClient, asked: dict[str, bool]) -> None:
    del ring
    meta = (await generating(client, sampling_params={"max_new_tokens": 2}, **asked)).json()["meta_info"]
    assert meta["cached_tokens_details"] == {"device": meta["cached_tokens"], "host": 0}
    streamed = await generating(client, stream=True, sampling_params={"max_new_tokens": 2}, **asked)
    assert '"cached_tokens_details":{"device":' in streamed.text

"""Where the cached tokens of a prompt were, as SGLang says it: by /generate always, in chats and texts if asked."""

import json
from typing import Any

import httpx
import msgspec
import pytest

from nodes.gateway.answers.responses import cached_details
from tests.nodes.gateway.test_aborts import CHAT, PROMPT, generating


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
    assert msgspec.to_builtins(cached_details(*counts)) == details


@pytest.mark.parametrize("asked", [{}, {"return_cached_tokens_details": True}, {"return_cached_tokens_details": False}])
async def test_every_answer_of_generate_has_them(ring: Any, client: httpx.AsyncClient, asked: dict[str, bool]) -> None:
    del ring
    meta = (await generating(client, sampling_params={"max_new_tokens": 2}, **asked)).json()["meta_info"]
    assert meta["cached_tokens_details"] == {"device": meta["cached_tokens"], "host": 0}
    streamed = await generating(client, stream=True, sampling_params={"max_new_tokens": 2}, **asked)
    assert '"cached_tokens_details":{"device":' in streamed.text


def chunks_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


SURFACES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": CHAT}),
    ("/v1/completions", {"prompt": PROMPT}),
    ("/v1/completions", {"prompt": ["a", PROMPT, PROMPT]}),
]


@pytest.mark.parametrize(("path", "body"), SURFACES)
async def test_chats_and_texts_have_them_where_they_are_asked_for(
    ring: Any, client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    del ring
    body = {"max_tokens": 2, **body}
    whole = (await generating(client, path, **body, return_cached_tokens_details=True)).json()
    (details,) = whole["sglext"].values()
    assert whole["sglext"] == {"cached_tokens_details": {"device": details["device"], "host": 0}}
    # Of the first prompt that had some, as at SGLang.
    num_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    if num_prompts == 1:
        assert details["device"] == whole["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    for asked in ({}, {"return_cached_tokens_details": False}):
        assert "sglext" not in (await generating(client, path, **body, **asked)).json()


@pytest.mark.parametrize(("path", "body"), SURFACES)
@pytest.mark.parametrize("counts", [{}, {"stream_options": {"include_usage": True}}])
async def test_streams_have_them_in_a_chunk_of_their_own_before_the_usage(
    ring: Any, client: httpx.AsyncClient, path: str, body: dict[str, Any], counts: dict[str, Any]
) -> None:
    del ring
    body = {"max_tokens": 2, "stream": True, **body, **counts}
    plain = chunks_of((await generating(client, path, **body)).text)
    chunks = chunks_of((await generating(client, path, **body, return_cached_tokens_details=True)).text)
    (at,) = [number for number, chunk in enumerate(chunks) if "sglext" in chunk]
    assert chunks[at]["choices"] == []
    assert chunks[at]["sglext"]["cached_tokens_details"]["host"] == 0
    assert chunks[at]["sglext"]["cached_tokens_details"]["device"] > 0
    assert at == len(chunks) - 1 - len(counts), "after all that samples have, before the usage"
    assert not [chunk for chunk in plain if "sglext" in chunk]

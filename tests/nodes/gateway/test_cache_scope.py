"""Whose pages a request may meet: by any route, requests share pages exactly if both of their keys are equal."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.hashing import root_hash
from nodes.gateway.errors import ApiError
from nodes.gateway.fields.cache_scope import scope_of
from nodes.gateway.jobs.validation import Job, Validator
from nodes.gateway.routes.app import SURFACES
from nodes.gateway.surfaces.vectors.routes import VECTORS
from tests.nodes.gateway.surfaces.vector_forms import CLASSES, EMBEDDING, config_of, job_of

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    "/generate": {"text": "hi"},
    "/embed": {"inputs": "hi"},
    "/encode": {"text": "hi"},
    **{path: {"input": "hi"} for path in ("/v1/embeddings", "/embeddings", "/classify", "/v1/classify")},
    **{path: {"text_1": "a", "text_2": "b"} for path in ("/score", "/v1/score")},
    **{path: {"query": "a", "documents": ["b"]} for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
}
GENERATING = {surface.path: surface for surface in SURFACES}
VALIDATOR = Validator(config_of(None))

# Few characters, so that parts that run into each other are drawn often.
KEYS = st.none() | st.text("a:0\0", min_size=1, max_size=4) | st.text(min_size=1, max_size=256)


def asked(path: str, **fields: Any) -> Job:
    body = BODIES[path] | fields
    if path in GENERATING:
        return GENERATING[path].read(VALIDATOR, json.dumps(body).encode(), "id-1")
    return job_of(path, CLASSES if "classify" in path else EMBEDDING, body)


def test_these_are_all_routes() -> None:
    assert BODIES.keys() == {*GENERATING, *VECTORS}


@pytest.mark.parametrize("path", BODIES)
def test_every_route_takes_both_keys_and_keeps_them_apart(path: str) -> None:
    pairs: list[tuple[str | None, str | None]] = [
        (None, None), ("k", None), (None, "k"), ("k", "k"), ("k", ":k"), (None, ":k"), ("k:k", None), ("k\0k", None),
    ]  # fmt: skip
    jobs = [asked(path, cache_salt=salt, extra_key=key) for salt, key in pairs]
    scopes = [job.prepare.extra_key for job in jobs]
    assert len(set(scopes)) == len(pairs)
    assert scopes == [scope_of(*pair) for pair in pairs], "the same on every route: a chat may meet a completion"
    assert not any(job.unknown_fields for job in jobs)


@given(KEYS, KEYS, KEYS, KEYS)
def test_pages_are_shared_exactly_by_equal_pairs(
    salt: str | None, key: str | None, other_salt: str | None, other_key: str | None
) -> None:
    one, other = scope_of(salt, key), scope_of(other_salt, other_key)
    assert (root_hash(one) == root_hash(other)) is ((salt, key) == (other_salt, other_key))


@given(st.text(min_size=1, max_size=256), KEYS, KEYS)
def test_no_extra_key_reaches_what_a_salt_isolates(salt: str, key: str | None, other: str | None) -> None:
    scope = scope_of(salt, key)
    for guess in (salt, scope, scope.partition(":")[0], other):
        assert scope_of(None, guess) != scope


def test_who_follows_the_cache_learns_keys_and_no_salts() -> None:
    scope = scope_of("the secret of one tenant", "space")
    assert scope.endswith(":space")
    assert "secret" not in scope
    assert scope_of(None, None) == "", "pages of nobody's stay where they were"


def test_the_form_is_stable() -> None:
    """Pages on disks and at other hosts are found by it: a change has them all computed again."""
    assert scope_of(None, "k") == ":k"
    assert scope_of("k", None) == "90752061ac68e402b6883da7a5402a75:"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
@pytest.mark.parametrize("value", ["", "x" * 257, 5, True, ["k"], {"k": 1}])
def test_what_is_no_key_is_refused_by_its_own_name(path: str, field: str, value: Any) -> None:
    with pytest.raises(ApiError) as refused:
        asked(path, **{field: value})
    assert (refused.value.status, refused.value.param) == (400, field)
    assert field in refused.value.message


@pytest.mark.parametrize("path", BODIES)
def test_the_longest_keys_are_taken(path: str) -> None:
    assert asked(path, cache_salt="x" * 256, extra_key="ü" * 256).prepare.extra_key.endswith(":" + "ü" * 256)

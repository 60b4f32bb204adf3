"""Asks: read from bodies, sent as bytes, opened at a worker; and the edits of each."""

import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.asks import (
    ASK_NAMES,
    ASKS,
    AskLimits,
    DrawnModel,
    InvalidAsk,
    RowEdits,
    asked,
    fields_of,
    open_asks,
    read_asks,
)
from nodes.asks.edits import mask_of
from nodes.request import MAX_ASK_BYTES, MAX_ASKS, Asked, SamplingDefaults

ROOT = Path(__file__).parents[3]
LIMITS = AskLimits(vocab_size=100)
MODEL = DrawnModel(vocab_size=100, end_token_ids=(1, 2))


def body(**given: Any) -> dict[str, Any]:
    absent = dict.fromkeys((*fields_of("chat"), *fields_of("text"), "min_tokens", "stop_token_ids", "ignore_eos"))
    return {**absent, **given}


def sent(**given: Any) -> list[Asked]:
    """The asks of a body, as a worker gets them."""
    asks = [ask.with_token_ids([[len(text)] for text in ask.texts()]) for ask in read_asks(body(**given), LIMITS)]
    return asked(asks)


def edits(asks: list[Asked], prompt: list[int], output: list[int]) -> RowEdits:
    found = RowEdits()
    for editor in open_asks(asks, MODEL).editors:
        editor.edit(array("i", [*prompt, *output]), len(output), found)
    return found


def test_a_body_without_any_asks_for_nothing() -> None:
    assert sent() == []
    assert sent(repetition_penalty=1.0, presence_penalty=0.0, bad_words=[], logit_bias={}, min_tokens=0) == []
    assert open_asks([], MODEL).editors == ()


def test_the_models_default_counts_where_a_body_says_nothing() -> None:
    limits = AskLimits(defaults=SamplingDefaults(repetition_penalty=1.3))
    assert [ask.name for ask in read_asks(body(), limits)] == ["repetition_penalty/1"]
    assert read_asks(body(repetition_penalty=1.0), limits) == []


@pytest.mark.parametrize(
    ("given", "prompt", "output", "field", "expected"),
    [
        ({"repetition_penalty": 2.0}, [5, 6, 5], [7], "scale", {5: 2.0, 6: 2.0, 7: 2.0}),
        ({"presence_penalty": 0.5}, [5], [7, 7, 8], "add", {7: -0.5, 8: -0.5}),
        ({"frequency_penalty": 0.5}, [5], [7, 7, 8], "add", {7: -1.0, 8: -0.5}),
        ({"presence_penalty": -1.0, "frequency_penalty": 0.25}, [], [9, 9], "add", {9: 0.5}),
        ({"logit_bias": {"3": -100.0, "4": 1.5}}, [], [], "bias", {3: -100.0, 4: 1.5}),
        ({"min_tokens": 2, "stop_token_ids": [9]}, [5], [7], "floor", {1, 2, 9}),
        ({"min_tokens": 2}, [5], [7, 7], "floor", set()),
        ({"bad_words": ["abc"]}, [], [], "floor", {3, 4}),
    ],
)
def test_edits(given: dict[str, Any], prompt: list[int], output: list[int], field: str, expected: Any) -> None:
    assert getattr(edits(sent(**given), prompt, output), field) == expected


def test_only_allowed_ids_are_allowed() -> None:
    found = edits(sent(allowed_token_ids=[0, 31, 32, 99], bad_words=["x" * 31]), [], [])
    assert [token_id for token_id in range(120) if found.allows(token_id)] == [0, 99]


def test_masks_of_two_asks_leave_what_both_allow() -> None:
    found = RowEdits()
    found.allow(mask_of([1, 2, 40], 100))
    found.allow(mask_of([2, 40, 99], 100))
    assert [token_id for token_id in range(128) if found.allows(token_id)] == [2, 40]


def test_a_word_of_several_tokens_is_kept_from_its_last_one_in_the_output_alone() -> None:
    [ask] = read_asks(body(bad_words=["ab"]), LIMITS)
    asks = asked([ask.with_token_ids([[5, 6, 7], [8]])])
    assert edits(asks, [5, 6], []).floor == {8}
    assert edits(asks, [5], [6]).floor == {8}
    assert edits(asks, [], [9, 5, 6]).floor == {8, 7}


@given(
    given=st.sampled_from(
        [{"repetition_penalty": 1.5}, {"presence_penalty": 0.3, "frequency_penalty": 0.7}, {"bad_words": ["a", "b"]}]
    ),
    prompt=st.lists(st.integers(0, 5), max_size=5),
    output=st.lists(st.integers(0, 5), max_size=12),
    positions=st.lists(st.integers(0, 12), max_size=12),
)
def test_an_editor_is_a_cache_of_a_pure_function(
    given: dict[str, Any], prompt: list[int], output: list[int], positions: list[int]
) -> None:
    asks = sent(**given)
    [editor] = open_asks(asks, MODEL).editors
    for position in positions:
        history = array("i", [*prompt, *output[:position]])
        found = RowEdits()
        editor.edit(history, len(history) - len(prompt), found)
        fresh = edits(asks, prompt, output[:position])
        assert all(getattr(found, field) == getattr(fresh, field) for field in RowEdits.__slots__)


@pytest.mark.parametrize(
    ("given", "top"),
    [
        ({"prompt_logprobs": 0}, 0),
        ({"prompt_logprobs": 20}, 20),
        ({"echo": True, "logprobs": 3}, 3),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 5}, 5),
        ({"echo": True, "logprobs": 0}, 0),
        ({"echo": True}, None),
        ({"echo": False, "logprobs": 3}, None),
    ],
)
def test_prompts_that_are_read(given: dict[str, Any], top: int | None) -> None:
    asks = sent(**given)
    assert [one.reads_prompt for one in asks if one.name == "prompt_logprobs/1"] == ([] if top is None else [True])
    reads = open_asks(asks, MODEL).prompt_reads
    assert (None if reads is None else reads.top) == top


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"logit_bias": {"07": 1.0}}, "logit_bias"),
        ({"logit_bias": {"100": 1.0}}, "logit_bias"),
        ({"logit_bias": {"9999999999": 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [100]}, "allowed_token_ids"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_served_names_its_field(given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidAsk) as raised:
        read_asks(body(**given), LIMITS)
    assert raised.value.param == param


def test_asks_that_are_too_long_together_are_refused_by_the_longest_ones_name() -> None:
    [words] = read_asks(body(bad_words=["a"]), LIMITS)
    long = words.with_token_ids([[70_000] * MAX_ASK_BYTES])
    with pytest.raises(InvalidAsk, match="bad_words"):
        asked([long, *read_asks(body(min_tokens=3), LIMITS)])


def test_the_table() -> None:
    assert len(set(ASK_NAMES)) == len(ASKS) <= MAX_ASKS
    for ask in ASKS:
        field, _, version = ask.name.partition("/")
        assert field.isidentifier()
        assert int(version) > 0


@pytest.mark.parametrize("asks", [[Asked("new/1", False, b"\x90")], [Asked("penalties/1", True, b"\xc1")]])
def test_an_ask_that_a_worker_does_not_know_is_a_problem_and_no_error(asks: list[Asked]) -> None:
    opened = open_asks(asks, MODEL)
    assert opened.problem
    assert not opened.editors


def test_neither_numpy_nor_torch_is_imported_with_the_table() -> None:
    # Roles are forked from a process with one thread, and OpenBLAS starts more when numpy is imported.
    code = "import sys, nodes.asks; print([name for name in ('numpy', 'torch', 'llguidance') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_roles_between_gateway_and_worker_know_no_ask() -> None:
    words = {ask.name.partition("/")[0] for ask in ASKS} - {"min_tokens"} | {"nodes.asks"}
    folders = ("nodes/scheduler", "nodes/detokenizer", "nodes/kv_agent", "nodes/registry", "kvstore", "mesh")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert not [f"{path}: {word}" for path in sources for word in words if word in path.read_text()]


def test_values_travel_as_arrays() -> None:
    [asked_for] = sent(presence_penalty=0.5)
    assert msgspec.msgpack.decode(asked_for.value) == [0.5, 0.0]
    assert asked_for.looks_back


def test_what_a_mask_and_a_floor_leave() -> None:
    edits = RowEdits()
    edits.floor = {3}
    assert [edits.allows(token_id) for token_id in (2, 3, 99)] == [True, False, True]
    assert not edits.allows_nothing(), "without a mask something is always left"
    edits.mask = mask_of([3, 5, -1, 200], 100)
    assert [edits.allows(token_id) for token_id in (2, 3, 5, 200)] == [False, False, True, False]
    assert not edits.allows_nothing()
    # Ids that the mask has no bit for are in the floor of models with a smaller vocabulary.
    edits.floor = {3, 5, 4000}
    assert edits.allows_nothing()

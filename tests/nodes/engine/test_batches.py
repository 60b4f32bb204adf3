"""What was given to `generate`, and the bodies that it becomes: every prompt in one, in order, with its own fields."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.engine.batches import Prompts, place_among_all
from nodes.gateway.errors import BadRequest
from nodes.gateway.surfaces.generate.body import GenerateBody

MOST_SAMPLES = 128


def bodies(prompts: Prompts, most: int = MOST_SAMPLES) -> list[dict[str, Any]]:
    return [msgspec.json.decode(batch.body) for batch in prompts.batches(most)]


@given(
    lengths=st.lists(st.one_of(st.integers(1, 50), st.integers(200_000, 400_000)), min_size=1, max_size=80),
    n=st.one_of(st.none(), st.integers(1, 200)),
    most=st.integers(1, 200),
)
def test_calls_have_all_prompts_in_order_and_are_no_larger_than_they_may(
    lengths: list[int], n: int | None, most: int
) -> None:
    texts = [chr(97 + number % 26) * length for number, length in enumerate(lengths)]
    prompts = Prompts(texts, None, {"sampling_params": {"n": n} if n else None, "stream": False})
    batches = list(prompts.batches(most))
    found = [text for batch in batches for text in msgspec.json.decode(batch.body)["text"]]
    assert found == texts
    sample = prompt = 0
    for batch in batches:
        assert (batch.first_prompt, batch.first_sample) == (prompt, sample)
        assert batch.num_samples == batch.num_prompts * (n or 1)
        assert batch.num_samples <= most or batch.num_prompts == 1
        assert len(batch.body) < 8 << 20
        # Every field is one that the route knows.
        msgspec.json.decode(batch.body, type=GenerateBody)
        prompt, sample = prompt + batch.num_prompts, sample + batch.num_samples


def test_entries_of_each_are_of_their_prompts_and_others_of_all() -> None:
    fields = {
        "sampling_params": [{"n": 2}, {"n": 1}],
        "return_logprob": True,
        "logprob_start_len": (3, 4),
        "token_ids_logprob": [[1], [2, 3]],
        "rid": ["a", "b"],
        "stream": None,
    }
    prompts = Prompts(None, [[1, 2], [3]], fields)
    first, second = bodies(prompts)
    assert first == {
        "input_ids": [[1, 2]], "sampling_params": {"n": 2}, "return_logprob": True, "logprob_start_len": 3,
        "token_ids_logprob": [1], "rid": ["a"],
    }  # fmt: skip
    assert (second["input_ids"], second["rid"], second["token_ids_logprob"]) == ([[3]], ["b"], [2, 3])
    assert [batch.first_sample for batch in prompts.batches(MOST_SAMPLES)] == [0, 2]
    # A list of ids is one value for all, and so is any list beside a single prompt.
    assert bodies(Prompts(["a", "b"], None, {"token_ids_logprob": [1, 2]})) == [
        {"text": ["a", "b"], "token_ids_logprob": [1, 2]}
    ]


@pytest.mark.parametrize(
    ("rid", "names"),
    [("r", [f"r_{n}" for n in range(70)]), ([f"mine-{n}" for n in range(70)], [f"mine-{n}" for n in range(70)])],
)
def test_every_prompt_of_a_long_list_has_a_name_of_its_own(rid: Any, names: list[str]) -> None:
    calls = bodies(Prompts(["x"] * 70, None, {"rid": rid}))
    assert [len(call["text"]) for call in calls] == [32, 32, 6]
    assert [name for call in calls for name in call["rid"]] == names
    assert bodies(Prompts(["x"], None, {"rid": "r"})) == [{"text": ["x"], "rid": ["r"]}]
    assert bodies(Prompts("x", None, {"rid": "r"})) == [{"text": "x", "rid": "r"}]
    # Of a call that scores only all of it has a name.
    assert bodies(Prompts(["x", "y"], None, {"rid": "r"}, field="documents")) == [{"documents": ["x", "y"], "rid": "r"}]


@pytest.mark.parametrize(
    ("prompt", "input_ids", "is_list", "body"),
    [
        ("hi", None, False, {"text": "hi"}),
        (["hi"], None, True, {"text": ["hi"]}),
        (("hi", "ho"), None, True, {"text": ["hi", "ho"]}),
        (None, [1, 2], False, {"input_ids": [1, 2]}),
        (None, [[1, 2]], True, {"input_ids": [[1, 2]]}),
        (None, np.array([1, 2]), False, {"input_ids": [1, 2]}),
        (None, [np.array([1, 2])], True, {"input_ids": [[1, 2]]}),
        # What is no prompt is refused by the route, in its words.
        (7, None, False, {"text": 7}),
        (None, [], False, {"input_ids": []}),
    ],
)
def test_one_prompt_and_a_list_of_one_are_told_apart(prompt: Any, input_ids: Any, is_list: bool, body: Any) -> None:
    prompts = Prompts(prompt, input_ids, {})
    assert prompts.is_list is is_list
    assert bodies(prompts) == [body]


@pytest.mark.parametrize(
    ("prompt", "input_ids", "fields", "param"),
    [
        (None, None, {}, "prompt"),
        ("a", [1], {}, "prompt"),
        ([], None, {}, "prompt"),
        ("a", None, {"text": "b"}, "text"),
        (["a", "b"], None, {"sampling_params": [{}]}, "sampling_params"),
        (["a", "b"], None, {"rid": ["a", "b", "c"]}, "rid"),
    ],
)
def test_what_does_not_fit_together_is_named(prompt: Any, input_ids: Any, fields: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        Prompts(prompt, input_ids, fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("param", "placed"),
    [("text.3", "text.67"), ("documents.0", "documents.64"), ("text", "text"), (None, None),
     ("token_ids_logprob.3", "token_ids_logprob.3"), ("sampling_params.stop.1", "sampling_params.stop.1")],
)  # fmt: skip
def test_an_error_names_the_place_among_all(param: str | None, placed: str | None) -> None:
    error = BadRequest(f"'{param}' is empty.", param=param)
    place_among_all(error, 64)
    assert (error.param, str(error)) == (placed, f"'{placed}' is empty.")

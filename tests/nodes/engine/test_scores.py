"""What `score` asks, and what it makes of the answers."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.engine.batches import MAX_PROMPTS
from nodes.engine.scores import scoring_of
from nodes.gateway.errors import BadRequest

IDS = [5, 3, 5]
LOGPROBS = st.floats(-1000, 0) | st.just(-9999.0)


def bodies(*given: Any, softmax: bool = False, item_first: bool = False, **fields: Any) -> list[Any]:
    scoring = scoring_of(*given, fields, softmax=softmax, item_first=item_first)
    assert scoring.prompts is not None
    return [msgspec.json.decode(batch.body) for batch in scoring.prompts.batches(128)]


@pytest.mark.parametrize(
    ("query", "items", "item_first", "prompts"),
    [
        ("a", "b", False, {"text": ["ab"]}),
        ("a", ["b", "c"], False, {"text": ["ab", "ac"]}),
        ("a", ("b", "c"), True, {"text": ["ba", "ca"]}),
        ([1, 2], [[3], [4]], False, {"input_ids": [[1, 2, 3], [1, 2, 4]]}),
        ((1, 2), [(3,)], True, {"input_ids": [[3, 1, 2]]}),
        (np.array([1]), [np.array([2])], False, {"input_ids": [[1, 2]]}),
    ],
)
def test_items_stand_behind_the_query_or_before_it(query: Any, items: Any, item_first: bool, prompts: Any) -> None:
    (body,) = bodies(query, items, np.array(IDS), item_first=item_first, priority=1)
    assert body == prompts | {
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "token_ids_logprob": IDS,
        "priority": 1,
    }


def test_pairs_go_to_the_route_in_several_calls_with_the_query_in_each() -> None:
    texts = [f"item {number}" for number in range(MAX_PROMPTS + 1)]
    assert bodies("q", texts, None, instruct="x") == [
        {"queries": "q", "documents": texts[:-1], "instruct": "x"},
        {"queries": "q", "documents": texts[-1:], "instruct": "x"},
    ]
    scoring = scoring_of("q", texts, None, {}, softmax=False, item_first=False)
    said = [{"data": [{"score": 0.5}] * MAX_PROMPTS}, {"data": [{"score": 0.25}]}]
    assert scoring.scores(said) == [0.5] * MAX_PROMPTS + [0.25]


@given(st.lists(st.tuples(LOGPROBS, LOGPROBS), min_size=1, max_size=5))
def test_scores_are_probabilities_in_the_order_of_the_tokens(logprobs: list[tuple[float, float]]) -> None:
    answers: list[Any] = [
        {"meta_info": {"output_token_ids_logprobs": [[[fifth, 5, None], [third, 3, None], [fifth, 5, None]]]}}
        for fifth, third in logprobs
    ]
    items = ["a"] * len(answers)
    plain = scoring_of("q", items, IDS, {}, softmax=False, item_first=False).scores([answers])
    assert plain == [[math.exp(fifth), math.exp(third), math.exp(fifth)] for fifth, third in logprobs]
    for (fifth, third), shares in zip(
        logprobs, scoring_of("q", items, IDS, {}, softmax=True, item_first=False).scores([answers]), strict=True
    ):
        assert isinstance(shares, list)
        assert sum(shares) == pytest.approx(1)
        assert shares[0] == shares[2] == pytest.approx(1 / (2 + math.exp(min(700.0, third - fifth))), rel=1e-6)


def test_of_nothing_nothing_is_asked() -> None:
    for token_ids in (None, IDS):
        scoring = scoring_of("q", [], token_ids, {}, softmax=False, item_first=False)
        assert scoring.prompts is None
        assert scoring.scores([]) == []


@pytest.mark.parametrize(
    ("given", "more", "param"),
    [
        (("q", 7, IDS), {}, "items"),
        (("q", ["a", [1]], IDS), {}, "items"),
        (([1], ["a"], IDS), {}, "items"),
        ((7, [[1]], IDS), {}, "query"),
        (("q", ["a"], []), {}, "label_token_ids"),
        (("q", ["a"], 7), {}, "label_token_ids"),
        (("q", ["a"], IDS), {"stream": True}, "stream"),
        (("q", ["a"], IDS), {"sampling_params": {"n": 2}}, "sampling_params"),
        (("q", [[1]], None), {}, "items"),
        (([1], ["a"], None), {}, "query"),
        (("q", ["a"], None), {"softmax": True}, "apply_softmax"),
        (("q", ["a"], None), {"item_first": True}, "item_first"),
        (("q", ["a"], None), {"documents": ["b"]}, "documents"),
        (("q", ["a"], None), {"queries": "b"}, "queries"),
    ],
)
def test_what_cannot_be_scored_is_named(given: Any, more: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        bodies(*given, **more)
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message

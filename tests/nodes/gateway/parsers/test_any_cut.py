"""Whatever a model writes and wherever it is cut: the same events, nothing lost, whole calls as they were meant."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.gateway.parsers.events import End
from tests.nodes.gateway.parsers.whole import whole_answer
from tests.nodes.gateway.parsers.written import (
    FORMS,
    Written,
    check_order,
    damaged,
    garbage,
    merged,
    parse,
    random_answer,
)

NUM_ANSWERS = 10_000


def check_any_text(form: str, text: str, tools: dict, random: random.Random) -> None:
    whole = parse(form, text, tools, [])
    assert "".join(event.source for event in whole) == text
    assert isinstance(whole[-1], End)
    check_order(whole, tools)
    cuts = sorted(random.sample(range(1, len(text)), min(len(text) - 1, 5))) if len(text) > 1 else []
    for pieces in (parse(form, text, tools), parse(form, text, tools, cuts)):
        assert merged(pieces) == merged(whole), text


def check_meaning(form: str, written: Written) -> None:
    import json

    answer = whole_answer(parse(form, written.text, written.tools, []))
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == written.calls
    if not written.calls:
        assert answer.text == written.before + written.after
        return
    # Blanks between text and calls belong to the calls, but those that end a text before them.
    before = written.before if written.before.strip() or form == "openai" else ""
    assert answer.text == before + (written.after if written.after.strip() or form == "openai" else "")


def check(form: str, random: random.Random) -> None:
    written = random_answer(random, form)
    check_meaning(form, written)
    check_any_text(form, written.text, written.tools, random)
    check_any_text(form, damaged(random, written.text), written.tools, random)
    check_any_text(form, garbage(random), written.tools, random)


@pytest.mark.parametrize("form", FORMS)
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=120)
def test_an_answer_means_the_same_wherever_it_is_cut(form, seed):
    check(form, random.Random(seed))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", FORMS)
def test_ten_thousand_answers_mean_the_same_wherever_they_are_cut(form):
    for seed in range(NUM_ANSWERS):
        check(form, random.Random(seed))

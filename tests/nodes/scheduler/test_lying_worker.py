"""A worker that answers nonsense, at the level of whole scheduler cores: no wrong token, nothing lost, nothing held."""

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mesh.address import Address
from mesh.runtime.effects import Told
from nodes.protocol import Adopted, RowError, StepResult
from tests.nodes.scheduler.scheduler_world import VOCAB, World, prompt

Lie = Callable[[StepResult], list[StepResult]]


def altered(result: StepResult, **fields: object) -> StepResult:
    return msgspec.structs.replace(result, **fields)


def other_token(result: StepResult, token_id: int) -> StepResult:
    """The first row that drew something drew this instead; a result that drew nothing stays as it is."""
    tokens = list(result.token_ids)
    drew = next((row for row, token in enumerate(tokens) if token >= 0), None)
    if drew is not None:
        tokens[drew] = token_id
    return altered(result, token_ids=tokens)


NONSENSE: dict[str, Lie] = {
    "too few": lambda one: [altered(one, token_ids=one.token_ids[:-1])],
    "too many": lambda one: [altered(one, token_ids=[*one.token_ids, 5])],
    "none": lambda one: [altered(one, token_ids=[])],
    "negative": lambda one: [other_token(one, -1)],
    "beyond the vocabulary": lambda one: [other_token(one, VOCAB)],
    "beyond what an array holds": lambda one: [other_token(one, 2**40)],
    "a token that nobody asked for": lambda one: [
        altered(one, token_ids=[5 if token < 0 else token for token in one.token_ids])
    ],
    "errors of rows that are not there": lambda one: [altered(one, errors=[RowError(99, "x", "")])],
}
HARMLESS: dict[str, Lie] = {
    "twice": lambda one: [one, one],
    "twice and different": lambda one: [one, other_token(one, 7)],
    "another scheduler's": lambda one: [altered(one, scheduler_epoch=one.scheduler_epoch + 1), one],
    "a step that never comes": lambda one: [altered(one, step=2**63), one],
    # Not the one before: where another lie was silent that is unanswered, and nobody could tell.
    "a step that was": lambda one: [altered(one, step=one.step - 2), one],
    "tokens of rows that failed": lambda one: [
        altered(one, token_ids=[2**40 if row in _failed(one) else t for row, t in enumerate(one.token_ids)])
    ],
    "not at all": lambda one: [],
}
NAMES = [*NONSENSE, *HARMLESS]


def _failed(result: StepResult) -> set[int]:
    return {error.row for error in result.errors}


class Liar:
    """A world whose workers' results pass through `lie` while it is set; `until_epoch`: only early incarnations lie."""

    def __init__(self, **settings_: object) -> None:
        self.world = World(num_pages={"m": 60}, **settings_)
        self.world.flush()
        self.lie: Lie | None = None
        self.until_epoch = 1
        self.num_lies = 0
        worker = self.world.workers["w-m"]

        def lying(result):
            told = [result] if self.lie is None or worker.epoch > self.until_epoch else list(self.lie(result))
            self.num_lies += told != [result]
            return told

        worker.told = lying

    def run(self) -> None:
        self.world.settle()
        self.world.check()

    @property
    def figures(self) -> dict[str, float]:
        return self.world.cores["m"].stats()


@pytest.fixture
def liar() -> Liar:
    return Liar()


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_costs_its_worker_the_place_and_nobody_a_token(liar: Liar, name: str) -> None:
    world = liar.world
    # A chunk that draws nothing, and rows that do; the workers are healthy until all of them run.
    early = [world.submit(prompt(9, base), "m", max_tokens=12, ignore_eos=True) for base in range(3)]
    world.until(lambda: all(len(request.output_ids) >= 3 for request in early))
    late = world.submit(prompt(30, 7), "m", max_tokens=6)
    liar.lie = NONSENSE[name]
    liar.run()
    assert liar.num_lies > 0
    assert all(request.finish for request in [*early, late])
    assert all(request.attempt == 0 for request in [*early, late]), "nobody had to go elsewhere"
    assert (world.workers["w-m"].epoch, liar.figures["mesh_scheduler_workers_fenced_total"]) == (2, 1)
    assert liar.figures['mesh_scheduler_results_refused_total{reason="malformed"}'] == 1
    # Said once for the fencing, and again for the death.
    assert [ready for _, _, ready in world.announced] == [True, False, False, True]


@pytest.mark.parametrize("name", HARMLESS)
def test_what_can_be_dropped_is_dropped_and_counted(liar: Liar, name: str) -> None:
    liar.world.workers["w-m"].poison = {2 + 3 * 101}
    liar.lie = HARMLESS[name]
    requests = [liar.world.submit(prompt(9, base), "m", max_tokens=6) for base in range(3)]
    poisoned = liar.world.submit(prompt(9, 3), "m", max_tokens=6)
    liar.run()
    assert all(request.finish for request in requests)
    assert poisoned.failure == "poisoned_request"
    dropped = sum(number for name, number in liar.figures.items() if "results_refused" in name)
    if name == "not at all":
        # Silence is no message that could be counted, but it does not go on for ever either.
        assert liar.world.workers["w-m"].epoch == 2
    else:
        assert (dropped > 0) == (name != "tokens of rows that failed")
        assert liar.world.workers["w-m"].epoch == 1


@example(seed=164, names=["a step that was", "not at all"])
@given(seed=st.integers(0, 10_000), names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_worker_that_lies_now_and_then(seed: int, names: list[str]) -> None:
    """Up to two incarnations lie, so that nobody is taken for the culprit: every request ends with its own tokens."""
    dice = random.Random(seed)
    liar = Liar()
    lies = {**NONSENSE, **HARMLESS}
    liar.lie = lambda one: lies[dice.choice(names)](one) if dice.random() < 0.2 else [one]
    liar.until_epoch = 2
    requests = [
        liar.world.submit(prompt(dice.randrange(1, 30), base), "m", max_tokens=dice.randrange(1, 12))
        for base in range(dice.randrange(1, 6))
    ]
    liar.run()
    assert all(request.finish for request in requests)


def test_a_request_that_makes_workers_answer_nonsense_fails_alone(liar: Liar) -> None:
    world = liar.world
    others = [world.submit(prompt(9, base), "m", max_tokens=6) for base in range(3)]
    culprit = world.submit(prompt(11, 9), "m", max_tokens=6)
    core = world.cores["m"]
    liar.until_epoch = 1000

    def lie(result: StepResult) -> list[StepResult]:
        # By a private name: a result says nothing of whose rows they were.
        sent = next((sent for sent in core.pipeline._sent if sent.plan.step == result.step), None)
        hit = sent is not None and any(one.request_id == culprit.request_id for one in sent.step.sequences)
        return [altered(result, token_ids=[])] if hit else [result]

    liar.lie = lie
    liar.run()
    assert culprit.failure == "poisoned_request"
    assert all(request.finish for request in others)
    assert world.workers["w-m"].epoch == 4, "twice with others, once alone"


def assert_goes_elsewhere(world: World, limit_s: float) -> None:
    """Nobody waits for ever, and nobody is told the worker's tokens."""
    world.leave()
    request = world.submit(prompt(9), "m", max_tokens=6)
    began = world.now
    while not request.attempt:
        world.flush()
        world.advance(world.now + 1.0)
        assert world.now - began < limit_s
    assert request.output_ids == []


def test_a_worker_that_lies_and_will_not_go_is_done_without(liar: Liar) -> None:
    liar.world.workers["w-m"].is_deaf = True
    liar.lie = NONSENSE["beyond the vocabulary"]
    assert_goes_elsewhere(liar.world, 100.0)
    assert liar.world.announced[-1] == ("m", None, False)


def test_a_worker_that_lies_about_its_epoch_is_done_without() -> None:
    """Nothing it sends comes from whom it says to be."""
    world = World(num_pages={"m": 60})
    world.workers["w-m"].adopted = lambda: Adopted(worker_epoch=2**60, numerics="", vocab_size=VOCAB)
    assert_goes_elsewhere(world, 200.0)


def test_a_result_from_anybody_else_is_not_looked_at(liar: Liar) -> None:
    world = liar.world
    request = world.submit(prompt(9), "m", max_tokens=3, ignore_eos=True)
    world.flush(("m", "w-m"))
    for sender in (Address("x", 1), Address("w-m", 9)):
        world.event("m", Told(sender, StepResult(scheduler_epoch=1, step=1, token_ids=[5])))
    assert liar.figures['mesh_scheduler_results_refused_total{reason="not_ours"}'] == 2
    liar.run()
    assert request.finish == "length"

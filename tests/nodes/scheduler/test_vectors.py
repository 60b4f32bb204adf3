"""Requests for vectors: a prefill and nothing more, from any group, cut anyhow, through deaths and preemptions."""

from array import array

import pytest

from mesh.address import Address
from nodes.protocol import Adopted, Pooled, RowError, StepResult, Submit
from nodes.request import VECTOR_KINDS, RequestSpec, Sampling, StopRules
from nodes.scheduler.batch.step import Step
from nodes.scheduler.sequence import Sequence
from nodes.scheduler.worker_link.result_check import find_problem
from tests.nodes.scheduler.scheduler_world import VOCAB, Worker, World, prompt, started

STOP = StopRules(max_tokens=1)


def sequence(kind: str, length: int = 40) -> Sequence:
    spec = RequestSpec(Sampling(), STOP, kind=kind)
    submit = Submit(
        request_id="r", attempt=1, gateway="g", detokenizer="t", prompt_ids=prompt(length), spec=spec, prefill="p"
    )
    return Sequence.from_submit(1, submit, Address("g", 3), [], 512, 0.0)


def test_a_vector_is_prefilled_here_and_needs_no_detokenizer() -> None:
    one = sequence("mean")
    assert (one.prefill, one.detokenizer, one.max_length, one.num_unscheduled) == ("", "", 40, 40)
    assert one.reusable_ids == array("i", prompt(40)[:1]), "a cache holds no states"
    assert sequence("last").reusable_ids == array("i", prompt(40))
    one.pooled, one.num_computed = b"sum.", 16
    assert (one.opening().kind, one.opening().pooled, one.opening().num_pooled) == ("mean", b"sum.", 16)
    one.drop_pages()
    assert one.opening().pooled == b"", "it begins again"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", VECTOR_KINDS)
def test_vectors_share_steps_with_tokens(kind: str, depth: int) -> None:
    world = started(pipeline_depth=depth)
    world.submit(prompt(30, 9), "m", max_tokens=20, ignore_eos=True)
    lengths = (1, 2, 3, 4, 5, 8, 9, 31, 40, 40)
    vectors = [world.submit(prompt(length), "m", kind=kind) for length in lengths]
    world.settle()
    world.check()
    assert all(one.finish for one in vectors)
    assert bool(vectors[-1].num_cached_tokens) == (kind == "last"), "the last of two equal prompts"
    # Nothing is decoded: as many positions are computed as there are tokens that were not cached.
    others = world.cores["m"].results
    assert (others.num_vectors, others.num_output_tokens) == (len(lengths), 20)


@pytest.mark.parametrize("kind", VECTOR_KINDS)
def test_a_vector_survives_the_worker_s_death_without_beginning_again(kind: str) -> None:
    world = started(pipeline_depth=2)
    vector = world.submit(prompt(48), "m", kind=kind)
    core, worker = world.cores["m"], world.workers["w-m"]
    world.until(lambda: core.results.num_computed_tokens >= 16)
    world.restart_worker("m")
    worker.row_counts.clear()
    world.settle()
    world.check()
    assert vector.finish
    assert vector.attempt == 0
    assert sum(tokens for _, tokens in worker.row_counts) <= 32, "only what was not acknowledged is computed again"


def test_a_vector_that_is_preempted_begins_again_and_is_right() -> None:
    world = started(num_pages={"m": 24}, pipeline_depth=2)
    core = world.cores["m"]
    for base in (1, 2, 3):
        world.submit([base * 10 + at for at in range(8)], "m", max_tokens=24, ignore_eos=True)
        core.books.growth.new_token_ratio = 0.1
    world.until(lambda: core.results.num_output_tokens >= 3)
    core.books.growth.new_token_ratio = 0.02
    vector = world.submit(prompt(48), "m", kind="mean")
    seen: list[bytes] = []
    preempt = core.books.running.preempt

    def watched(victim: Sequence) -> None:
        seen.append(victim.pooled if victim.is_vector else b"")
        preempt(victim)

    core.books.running.preempt = watched
    world.settle()
    world.check()
    assert vector.finish
    assert any(seen), "it was preempted between two chunks"


def test_a_lost_vector_is_told_again() -> None:
    world = started()
    vector = world.submit(prompt(9), "m", kind="last")
    link = ("m", "edge")
    world.until(lambda: any(isinstance(packet.message, Pooled) for packet in world.links.get(link, [])))
    world.links[link].clear()
    assert not vector.vector
    world.settle()
    world.check()
    assert vector.finish
    assert world.cores["m"].results.num_vectors == 1, "it was made once"


def test_a_prompt_that_fills_the_context_has_a_vector_and_no_token() -> None:
    world = started(context_length=64)
    fits, too_long = world.submit(prompt(64), "m", kind="last"), world.submit(prompt(65), "m", kind="last")
    token = world.submit(prompt(64), "m", max_tokens=1)
    world.settle()
    assert (fits.finish, too_long.failure, token.failure) == ("stop", "never_fits", "never_fits")


class Plain(Worker):
    """A worker of a model that makes no vectors."""

    def adopted(self) -> Adopted:
        return Adopted(worker_epoch=self.epoch, numerics="", vocab_size=VOCAB)


def test_a_group_that_makes_no_vectors_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.nodes.scheduler.scheduler_world.Worker", Plain)
    world = World(num_pages={"m": 60})
    world.flush()
    vector = world.submit(prompt(9), "m", kind="last")
    world.settle()
    assert vector.failure == "unsupported_ask"


def test_what_a_worker_may_say_of_a_vector() -> None:
    plain = Sequence(2, prompt(4), 4, RequestSpec(Sampling(), STOP), 0.0)
    mean, last = sequence("mean"), sequence("last")
    rows = array("i", [0, 1, 0, 16, 0, 0, 1, 1, 1, 0, 16, 0, 0, 1, 2, 2, 0, 3, 0, 0, 1])
    step = Step(rows, [mean, last, plain], array("i"), array("i"), [])

    def problem(*vectors: bytes, failed: int = -1) -> str:
        errors = [RowError(failed, "poisoned_request", "")] if failed >= 0 else []
        tokens = [-1, -1, -1]
        return find_problem(
            step, StepResult(scheduler_epoch=1, step=7, token_ids=tokens, errors=errors, vectors=list(vectors)), 0
        )

    assert not problem(b"sum.", b"", b"")
    assert not problem(b"", b"", b"", failed=0)
    assert "answered with 0 bytes" in problem()
    assert "answered with vectors of 1" in problem(b"sum.")
    assert "answered with 3 bytes" in problem(b"sum", b"", b"")
    assert "answered with 4 bytes" in problem(b"sum.", b"last", b"")
    assert "answered with 262148 bytes" in problem(bytes((1 << 18) + 4), b"", b"")
    assert "makes no vector" in problem(b"sum.", b"", b"tok.")


def test_an_encoder_s_prompts_are_computed_whole_and_their_pages_are_nobody_s() -> None:
    world = started(is_encoder=True, context_length=40, chunk_tokens=40, step_tokens=40, max_running=8)
    core, worker = world.cores["m"], world.workers["w-m"]
    vectors = [world.submit(prompt(length), "m", kind="mean") for length in (25, 40, 9, 40, 3)]
    token = world.submit(prompt(5), "m")
    world.until(lambda: core.results.num_vectors >= 2)
    world.restart_worker("m")
    world.settle()
    world.check()
    assert all(one.finish for one in vectors)
    assert token.failure == "unsupported_ask"
    assert max(tokens for _, tokens in worker.row_counts) == 40
    assert core.books.cache.num_hit_tokens == 0
    assert core.books.cache.blocks.num_violations == 0
    assert core.books.cache.match(array("i", prompt(40))).num_tokens == 0, "no page is found by its tokens"

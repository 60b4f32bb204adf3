"""Prompts that are read: what is reused of a cache, what a worker may answer, what a gateway is told."""

from array import array
from typing import Any

import pytest

from mesh.address import Address
from nodes.asks import asked
from nodes.asks.prompt_logprobs import PromptLogprobs
from nodes.protocol import PromptRead, RowError, StepResult, Submit
from nodes.request import RequestSpec, Sampling, StopRules
from nodes.scheduler.batch.step import Step
from nodes.scheduler.events import Outbox
from nodes.scheduler.finish import streams
from nodes.scheduler.finish.streams import Streams
from nodes.scheduler.sequence import Sequence
from nodes.scheduler.worker_link.result_check import find_problem
from tests.nodes.scheduler.scheduler_world import started
from tests.nodes.scheduler.test_pipeline import bench, sent_steps

PROMPT = list(range(100, 140))


def sequence(position: int = 0, output: list[int] | None = None, *, is_read: bool = True) -> Sequence:
    asks = asked([PromptLogprobs(0)] if is_read else [])
    spec = RequestSpec(Sampling(temperature=0.0, asks=asks), StopRules(max_tokens=8))
    submit = Submit(
        request_id="r", attempt=1, gateway="g", detokenizer="t", prompt_ids=PROMPT, spec=spec, output_ids=output or [],
        prefill="scheduler-p", prompt_position=position,
    )  # fmt: skip
    return Sequence.from_submit(1, submit, Address("g", 3), [], 512, 0.0)


def payload(position: int, count: int) -> bytes:
    return b"".join(at.to_bytes(8, "little") for at in range(position, position + count))


def told(outbox: Outbox) -> list[PromptRead]:
    return [command.message for command in outbox.take() if isinstance(command.message, PromptRead)]  # type: ignore[union-attr]


def test_nothing_is_reused_behind_what_is_still_to_be_read() -> None:
    one = sequence()
    assert one.prefill == "", "it is prefilled where it decodes"
    assert one.reusable_ids == array("i", PROMPT[:1])
    assert sequence(17).reusable_ids == array("i", PROMPT[:17])
    assert sequence(len(PROMPT), [5, 6]).reusable_ids == array("i", [*PROMPT, 5, 6])
    assert one.opening().token_ids == PROMPT
    plain = sequence(is_read=False)
    assert (plain.prefill, plain.reusable_ids, plain.opening().token_ids) == ("scheduler-p", array("i", PROMPT), [])


@pytest.mark.parametrize(("start", "count", "num"), [(0, 16, 16), (32, 8, 7), (32, 7, 7), (39, 1, 0), (40, 1, 0)])
def test_positions_that_a_row_reads(start: int, count: int, num: int) -> None:
    assert sequence().num_read_by(start, count) == num


def test_a_gateway_is_told_once_what_is_new_and_again_what_it_asks_for(monkeypatch: Any) -> None:
    outbox = Outbox()
    out, one = Streams(outbox), sequence()
    out.read(one, 0, 16, payload(1, 16))
    # Computed again from a page before: after a preemption, or by another worker.
    out.read(one, 8, 16, payload(9, 16))
    out.read(one, 8, 8, payload(9, 8))
    assert [(said.position, said.count, said.payload) for said in told(outbox)] == [
        (1, 16, payload(1, 16)),
        (17, 8, payload(17, 8)),
    ]
    monkeypatch.setattr(streams, "MOST_PROMPT_BYTES", 8 * 10)
    out.tell_read(one, 5)
    assert [(said.position, said.count) for said in told(outbox)] == [(5, 10), (15, 10)]
    out.tell_read(one, 25)
    assert told(outbox) == []
    out.read(sequence(is_read=False), 0, 16, payload(1, 16))
    assert told(outbox) == []
    later = sequence(10)
    out.read(later, 9, 7, payload(10, 7))
    out.tell_read(later, 1)
    assert [said.position for said in told(outbox)][-1] == 10, "it has nothing of what comes before"


def test_a_position_that_is_read_has_the_time_of_another_token() -> None:
    pipeline = bench()

    def timeout_s(*, is_read: bool) -> float:
        one = sequence(is_read=is_read)
        step = Step(array("i", [0, 1, 0, 32, 0, 0, 2]), [one], array("i", PROMPT[:32]), array("i", [1, 2]), [])
        pipeline.pipeline.send([step], 0.0)
        [sent] = [command.message for command in sent_steps(pipeline.outbox.take())]
        return sent.timeout_s

    timeout_s(is_read=False)
    assert pipeline.result(1, [-1], elapsed_s=3.05) == [[-1]]
    assert timeout_s(is_read=False) == pytest.approx(30.5)
    assert timeout_s(is_read=True) == pytest.approx(61.0)


def test_what_a_worker_may_say_of_a_prompt() -> None:
    one, plain = sequence(), sequence(is_read=False)
    rows = array("i", [0, 1, 0, 16, 0, 0, 1, 1, 2, 0, 4, 0, 0, 1])
    step = Step(rows, [one, plain], array("i"), array("i"), [])

    def problem(*extras: bytes, failed: int = -1) -> str:
        errors = [RowError(failed, "poisoned_request", "")] if failed >= 0 else []
        result = StepResult(scheduler_epoch=1, step=7, token_ids=[-1, -1], errors=errors, prompt_extras=list(extras))
        return find_problem(step, result, 0)

    assert not problem(payload(1, 16), b"")
    assert not problem(b"", b"", failed=0)
    assert not problem(failed=0)
    for wrong in ((), (b"", b""), (payload(1, 16)[:-1], b""), (payload(1, 16) * 1000, b"")):
        assert "reads 16 positions" in problem(*wrong)
    assert "what 1 rows read" in problem(payload(1, 16))
    assert one.reading is not None
    one.reading.add(1, 1, b"four")
    assert "reads 16 positions" in problem(payload(1, 16), b""), "all payloads of a prompt have one size"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_whose_reading_is_interrupted_is_read_once_and_right(depth: int) -> None:
    world = started(num_pages={"m": 24}, pipeline_depth=depth)
    core = world.cores["m"]
    for base in (1, 2, 3):
        world.submit([base * 10 + at for at in range(8)], "m", max_tokens=24, ignore_eos=True)
        core.books.growth.new_token_ratio = 0.1
    world.until(lambda: core.results.num_output_tokens >= 3)
    # As if the others were about to end: they are not, and take its pages while it is prefilled.
    core.books.growth.new_token_ratio = 0.02
    read = world.submit([2 + at * 7 % 90 for at in range(48)], "m", max_tokens=3, is_read=True)
    victims: list[tuple[int, bool]] = []
    preempt = core.books.running.preempt

    def watched(victim: Sequence) -> None:
        if victim.reading is not None:
            victims.append((victim.reading.next, victim.reading.is_whole))
        preempt(victim)

    core.books.running.preempt = watched
    world.settle()
    assert read.finish
    assert [at for at, is_whole in victims if at > 1 and not is_whole], "it was preempted between two chunks"


def test_a_prompt_is_read_in_chunks_beside_others_and_over_a_worker_s_death() -> None:
    world = started()
    requests = [world.submit(list(range(2, 45 + n)), "m", max_tokens=4, is_read=bool(n % 2)) for n in range(4)]
    world.until(lambda: any(request.reading and request.reading.next > 9 for request in requests))
    assert not any(request.reading and request.reading.is_whole for request in requests)
    world.restart_worker("m")
    world.settle()
    assert all(request.finish for request in requests)
    assert [request.num_cached_tokens for request in requests if request.reading] == [0, 0], "nothing is reused unread"

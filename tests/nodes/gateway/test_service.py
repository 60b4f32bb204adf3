"""Answers that do not fit, actors that do not answer, and what a scrape does about them."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from nodes.gateway.errors import ApiError
from nodes.gateway.jobs.validation import Validator
from nodes.gateway.local import LocalGateway
from nodes.gateway.requests.events import CancelFailed
from nodes.gateway.shown.scrape import Scraper
from nodes.protocol import (
    AttemptsCancelled,
    AttemptsSubmitted,
    CancelAttempts,
    ChooseMoves,
    Detokenized,
    Load,
    Prepared,
    Route,
    SubmitAttempts,
    TextBatch,
    TextDelta,
    WorkerAway,
)
from tests.mesh.mesh_under_test import until
from tests.nodes.gateway.fake_ring import CONFIG, FakeScheduler, FakeTokenizer, Ring

VALIDATOR = Validator(CONFIG)


@pytest.fixture
def ring(settings: dict[str, Any]) -> Ring:
    return Ring(msgspec.structs.replace(CONFIG, **settings), serve_http=False)


def job(**fields: Any) -> Any:
    body = {"prompt": "hello", "max_tokens": 3} | fields
    return VALIDATOR.text(json.dumps(body).encode(), f"cmpl-{id(fields)}")


async def begin(ring: Ring, **fields: Any) -> Any:
    wanted, service = job(**fields), ring.gateway.service
    return service.open(wanted, await service.tokenizers.prepare(wanted.prepare, prompt_param="prompt"), service.now())


async def generate(ring: Ring, **fields: Any) -> Any:
    generation = await begin(ring, **fields)
    while not generation.output.is_finished:
        await generation.output.wait()
    return generation.output


async def take_place(ring: Ring, actor_id: str, actor: Any, **attributes: Any) -> None:
    """This one instead of the ring's own."""
    await ring.kill(actor_id)
    await ring.start(actor_id, actor, **attributes)
    await until(lambda: not ring.gateway.service.missing_roles())


class Confused(FakeTokenizer):
    """Answers whatever it is told to."""

    answer: Any = None

    def on_ask(self, call: Any) -> None:
        if self.answer is None:
            super().on_ask(call)
        else:
            call.reply(self.answer)


@pytest.mark.parametrize(
    "answer",
    [
        Detokenized(text="x"),
        Prepared(token_ids=[]),
        Prepared(token_ids=[[1]]),
        Prepared(token_ids=[[1], [2]], routes=[]),
    ],
)
async def test_a_tokenizer_s_answer_that_does_not_fit(ring: Ring, answer: Any) -> None:
    confused = Confused(ring.faults, ring.seen)
    confused.answer = answer
    await take_place(ring, "tok0", confused)
    with pytest.raises(ApiError, match="does not match"):
        await ring.gateway.service.tokenizers.prepare(job().prepare, prompt_param="prompt")
    if not isinstance(answer, Detokenized):
        with pytest.raises(ApiError, match="does not match"):
            await ring.gateway.service.tokenizers.detokenize([1], skip_special_tokens=False)


async def test_a_route_that_is_none(ring: Ring) -> None:
    confused = Confused(ring.faults, ring.seen)
    await take_place(ring, "tok0", confused)
    ring.faults.failing_attempts = 1
    ring.faults.step_s = 0.02
    wanted = job()
    service = ring.gateway.service
    prepared = await service.tokenizers.prepare(wanted.prepare, prompt_param="prompt")
    confused.answer = Detokenized(text="x")
    generation = service.open(wanted, prepared, service.now())
    await until(lambda: service.core.num_waiting == 1 and service.core.num_retries == 1)
    await asyncio.sleep(0.1)
    confused.answer = None
    while not generation.output.is_finished:
        await generation.output.wait()
    assert generation.output.failure is None


class ConfusedScheduler(FakeScheduler):
    """Takes requests and cancels, and answers with the wrong thing."""

    num_confused_submits = 0
    num_confused_cancels = 0

    def on_ask(self, call: Any) -> None:
        if isinstance(call.message, SubmitAttempts) and self.num_confused_submits:
            self.num_confused_submits -= 1
            call.reply(AttemptsCancelled(attempts=[]))
        elif isinstance(call.message, CancelAttempts) and self.num_confused_cancels:
            self.num_confused_cancels -= 1
            call.reply(AttemptsSubmitted(held=[]))
        else:
            super().on_ask(call)


async def test_what_one_turn_of_the_loop_brings_is_written_in_one_piece(ring: Ring) -> None:
    """A gateway that lags has many frames before it at once, and must not write each of their tokens by itself."""

    ring.faults.step_s = 3600.0
    service, generation = ring.gateway.service, await begin(ring, max_tokens=50, stream=True)
    output, written = generation.output, []
    await until(lambda: output.is_started)
    output.write_through(lambda: not written.append(output.take()))
    writer = asyncio.ensure_future(output.wait())
    await asyncio.sleep(0)
    (request_id,) = generation.request_ids
    for n in range(5):
        service.handle(TextBatch(deltas=[TextDelta(request_id, 0, n, [1], n, "abcde"[n])]))
    assert written == []
    await asyncio.sleep(0.01)
    assert [[piece.text for piece in pieces] for pieces in written] == [["abcde"]]
    assert not writer.done()
    service.abandon(generation)
    await writer


async def test_a_scheduler_s_answers_that_do_not_fit(ring: Ring) -> None:
    confused = ConfusedScheduler(ring.faults, ring.seen)
    confused.num_confused_submits = confused.num_confused_cancels = 1
    await take_place(ring, "d0", confused, group="a")
    output = await generate(ring)
    assert output.failure is None
    assert output.take()[0].text == "hel"
    await until(lambda: ring.gateway.service.core.is_idle)


@pytest.mark.settings(cancel_timeout_s=0.1)
async def test_a_cancel_that_gets_no_answer_is_repeated(ring: Ring) -> None:
    scheduler = ring.scheduler
    answered = scheduler.on_ask
    ignored: list[Any] = []

    def ignore_once(call: Any) -> None:
        if isinstance(call.message, CancelAttempts) and not ignored:
            ignored.append(call)
        else:
            answered(call)

    scheduler.on_ask = ignore_once
    await generate(ring)
    await until(lambda: ring.gateway.service.core.is_idle)
    assert ignored
    assert ring.seen.cancels


async def test_a_cancel_at_a_dead_scheduler_is_given_up(ring: Ring) -> None:
    ring.faults.silent = True
    service, generation = ring.gateway.service, await begin(ring)
    await until(lambda: bool(ring.scheduler.held))
    await ring.kill("d0")
    await until(lambda: ring.gateway.ctx.members.get("d0") is None)
    service.abandon(generation)
    service.abandon(generation)
    service.handle(CancelFailed("d0", lost=True))
    await until(lambda: service.core.is_idle)
    assert generation.output.is_finished


async def test_messages_that_are_not_for_a_gateway_are_counted(ring: Ring) -> None:
    gateway = ring.gateway
    gateway.on_tell(gateway.ctx.address, Load(num_running=0, num_waiting=0, num_free_pages=0, num_pages=0), ())  # fmt: skip  # noqa: E501
    assert gateway.ctx.metrics.value("mesh_unhandled_total", type="Load") == 1
    gateway.on_tell(gateway.ctx.address, TextBatch(deltas=[]), ())


@pytest.mark.settings(scrape_timeout_s=0.2)
async def test_an_actor_that_does_not_answer_is_shown_as_down(ring: Ring) -> None:
    ring.network.crash(ring.systems["w0"].address)
    gateway = ring.gateway
    scraper = Scraper(gateway.ctx, ring.config)
    first, second = await asyncio.gather(scraper.answers(), scraper.answers())
    assert first is second, "one round of asks for both"
    page = await scraper.page()
    lines = page.decode().splitlines()
    assert 'mesh_actor_up{actor="w0",role="worker"} 0.0' in lines or not any("w0" in line for line in lines)
    assert 'mesh_actor_up{actor="d0",role="scheduler"} 1.0' in lines
    assert await scraper.answers() is not first


async def test_readiness_wants_a_scheduler_with_its_worker(ring: Ring) -> None:
    service = ring.gateway.service
    ring.systems["d0"].announce(worker_ready=False)
    await until(lambda: service.missing_roles() == ["no scheduler has a worker that is ready"])
    ring.systems["d0"].announce(worker_ready=True)
    await until(lambda: not service.missing_roles())
    ring.systems["w0"].announce(group="another")
    await until(lambda: bool(service.missing_roles()))


async def test_seeds_may_be_drawn_by_a_simulation() -> None:
    async with Ring(serve_http=False) as ring:
        await take_place(ring, "g0", LocalGateway(CONFIG, draw_seed=lambda: 42))
        await generate(ring)
        assert ring.seen.submits[-1].spec.sampling.seed == 42


class _SilentTokenizer(FakeTokenizer):
    """Answers nothing to who wants to move."""

    def on_ask(self, call: Any) -> None:
        if not isinstance(call.message, ChooseMoves):
            super().on_ask(call)


class _OddTokenizer(FakeTokenizer):
    """Answers something else."""

    def on_ask(self, call: Any) -> None:
        if isinstance(call.message, ChooseMoves):
            call.reply(Route(decode="d1"))
        else:
            super().on_ask(call)


async def with_two_groups(ring: Ring) -> Any:
    """Two of the same bits, and five requests at the first, which computes nothing for them."""
    ring.scheduler.ctx.announce(numerics="bits", weights="w")
    ring.faults.silent = True
    output = (await begin(ring, n=5)).output
    await until(lambda: len(ring.seen.submits) == 5)
    ring.faults.silent = False
    await ring.start("d1", FakeScheduler(ring.faults, ring.seen), group="b", numerics="bits", weights="w")
    await until(lambda: len(ring.gateway.service.core._peers._schedulers.bits) == 2)
    return output


def say_away(ring: Ring, returns_in_s: float = 5.0) -> None:
    ring.scheduler.ctx.tell("g0", WorkerAway(returns_in_s=returns_in_s))


async def test_requests_of_a_dead_worker_are_asked_for_in_one_ask_and_submitted_in_one(ring: Ring) -> None:
    output = await with_two_groups(ring)
    say_away(ring)
    while not output.is_finished:
        await output.wait()
    (asked,) = ring.seen.moves
    assert (asked.holder, len(asked.requests)) == ("d0", 5)
    assert [one.attempt for one in ring.seen.submits] == [0] * 5 + [1] * 5
    assert {(ref.attempt, ref.request_id) for ref in ring.seen.cancels} >= {
        (0, one.request_id) for one in ring.seen.submits
    }
    assert ring.gateway.stats()["mesh_gateway_moves_total"] == 5


@pytest.mark.parametrize("kind", [_SilentTokenizer, _OddTokenizer])
async def test_without_an_answer_requests_stay(ring: Ring, kind: type[FakeTokenizer]) -> None:
    await take_place(ring, "tok0", kind(ring.faults, ring.seen))
    await with_two_groups(ring)
    say_away(ring, 0.3)
    await asyncio.sleep(0.4)
    assert len(ring.seen.submits) == 5
    assert ring.gateway.service.core.num_requests == 5

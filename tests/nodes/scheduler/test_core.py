"""One scheduler by events: requests and how they end, streams, workers that go and come, draining, figures."""

from array import array

import pytest
from msgspec.structs import replace

from kvstore.hashing import pack_tokens
from kvstore.protocol import CacheCleared, CacheEvents, PagesStored
from mesh.address import Address
from mesh.runtime.effects import Answered, Ask, Asked, AskFailed, Refuse, Reply, Tell, Told
from nodes.asks import ASK_NAMES
from nodes.protocol import (
    Adopt,
    Adopted,
    AttemptFailed,
    CancelPrefill,
    FindFates,
    Load,
    OrderPrefills,
    PrefillOrder,
    PrefillsOrdered,
    Resend,
    ResendFrom,
    StopAt,
    Submit,
    SubmitAttempts,
    TokenBatch,
)
from nodes.protocol.steps import RowColumn
from nodes.request import VECTORS, AttemptRef, RequestSpec, Sampling, StopRules
from nodes.scheduler.cache_news import GATHER_S, RESTATE_PAUSE_S
from nodes.scheduler.core import SchedulerCore
from nodes.scheduler.events import Announce, DrainAsked, FollowerReset, MembersChanged, PeerLost, ReadyPeer, Wake
from nodes.scheduler.sequence import Stage
from nodes.worker.core import AdoptArrived
from tests.nodes.scheduler.scheduler_world import (
    EDGE,
    EOS,
    NO_STOP,
    Request,
    World,
    expected,
    next_token,
    prompt,
    started,
)
from tests.nodes.step_plans import column


def stopping(number: int) -> list[int]:
    """A prompt whose output ends by itself after `number` tokens."""
    for base in range(5000):
        tokens = prompt(5, base)
        for _ in range(number):
            tokens.append(next_token(tokens))
        if tokens[-1] == EOS and EOS not in tokens[5:-1]:
            return tokens[:5]
    raise AssertionError


# requests


@pytest.fixture
def world() -> World:
    return started()


@pytest.fixture
def pair() -> World:
    """Decode and prefill in different groups."""
    return started(num_pages={"d": 60, "p": 60})


def test_the_end_token_is_sent_and_counted_and_says_stop(world: World) -> None:
    request = world.submit(stopping(4), "m", max_tokens=20)
    world.settle()
    assert (request.output_ids[-1], len(request.output_ids), request.finish) == (EOS, 4, "stop")


def test_rules_of_ending(world: World) -> None:
    tokens = stopping(3)
    ignoring = world.submit(tokens, "m", max_tokens=6, ignore_eos=True)
    second = expected(tokens, ignoring.stop, 256)[0][1]
    stopped = world.submit(tokens, "m", max_tokens=6, stop_token_ids=[second])
    nothing = world.submit(tokens, "m", max_tokens=0)
    world.settle()
    assert (len(ignoring.output_ids), stopped.output_ids[-1]) == (6, second)
    assert (stopped.finish, len(stopped.output_ids)) == ("stop", 2)
    assert (nothing.finish, nothing.output_ids) == ("length", [])


def test_no_end_or_stop_id_is_drawn_within_min_tokens_and_the_next_one_ends(world: World) -> None:
    tokens = stopping(3)
    patient = world.submit(tokens, "m", max_tokens=200, min_tokens=4)
    ignoring = world.submit(tokens, "m", max_tokens=200, min_tokens=4, ignore_eos=True)
    plain = world.submit(tokens, "m", max_tokens=200)
    world.settle()
    assert len(plain.output_ids) == 3
    assert len(patient.output_ids) > 4
    assert EOS not in patient.output_ids[:-1]
    assert (patient.finish, patient.output_ids[-1]) == ("stop", EOS)
    assert EOS not in ignoring.output_ids[:4], "as in vLLM: a masked end is not said, whether it would count or not"
    second = patient.output_ids[1]
    stopped = world.submit(tokens, "m", max_tokens=200, min_tokens=2, stop_token_ids=[second])
    world.settle()
    assert second not in stopped.output_ids[:2]


def test_min_tokens_count_from_the_prompt_in_every_attempt_and_in_a_prefill_elsewhere(pair: World) -> None:
    tokens = [*prompt(40), *stopping(3)]
    alone = pair.submit(tokens, "d", max_tokens=60, min_tokens=20)
    pair.settle()
    elsewhere = pair.submit(tokens, "d", prefill="p", max_tokens=60, min_tokens=20)
    pair.settle()
    assert elsewhere.output_ids == alone.output_ids
    later = Request("later", tokens, alone.stop, "d", "", attempt=1, output_ids=alone.output_ids[:7])
    pair.requests["later"] = later
    pair.send_submit(later)
    pair.settle()
    assert later.output_ids == alone.output_ids


def test_the_context_ends_a_request() -> None:
    world = started(context_length=20)
    request = world.submit(prompt(15), "m", max_tokens=100, ignore_eos=True)
    world.settle()
    assert (len(request.output_ids), request.finish) == (5, "length")


def submits(*prompts: tuple[str, list[int]], max_tokens: int) -> SubmitAttempts:
    """Attempts by their names, of a gateway that the world knows nothing of."""
    same = {"attempt": 0, "gateway": "g", "detokenizer": "x", "spec": RequestSpec(Sampling(), StopRules(max_tokens))}
    return SubmitAttempts(attempts=[Submit(request_id=name, prompt_ids=ids, **same) for name, ids in prompts])


@pytest.mark.parametrize(
    ("num_prompt", "num_output", "param", "message"),
    [
        (100, 100, "max_tokens", "you requested 200 tokens (100 in the prompt, 100 in the completion)"),
        (161, 1, "prompt", "your prompt resulted in 161 tokens"),
        (300, 1, "prompt", "your prompt resulted in 300 tokens"),
    ],
)
def test_what_never_fits_is_told_in_tokens_of_the_pool(num_prompt, num_output, param, message) -> None:
    core = started(num_pages={"m": 41}).cores["m"]
    asked = submits(("r", prompt(num_prompt)), max_tokens=num_output)
    (refused,) = core.handle(Asked(Address("g", 1), asked, 1), 0.0)[0].message.refused
    # 40 pages of 4 tokens, and one more, which nothing is computed from.
    limit = "This model's maximum context length is 161 tokens. However, "
    assert (refused.code, refused.param) == ("never_fits", param)
    assert refused.message.startswith(limit + message)


@pytest.mark.parametrize(
    ("tokens", "stop", "code"),
    [([], {}, "empty_prompt"), ([5, 997], {}, "bad_token_id"), ([5, -1], {}, "bad_token_id")],
)
def test_what_can_never_be_served_is_refused_at_once(tokens, stop, code) -> None:
    world = started(num_pages={"m": 41})
    request = world.submit(tokens, "m", **stop)
    world.flush()
    assert request.failure == code


def test_the_largest_request_that_fits_is_served() -> None:
    world = started(num_pages={"m": 41})
    request, over = (world.submit(prompt(60), "m", max_tokens=most, ignore_eos=True) for most in (101, 102))
    world.settle()
    assert (len(request.output_ids), over.failure) == (101, "never_fits")


def test_a_full_queue_sends_requests_elsewhere() -> None:
    world = started(max_waiting=2, max_running=1)
    requests = [world.submit(prompt(5, base), "m") for base in range(4)]
    world.flush("w-m")
    assert [request.failure for request in requests] == ["", "", "", "overloaded"]


def test_repeats_are_answered_alike_and_what_is_over_stays_over(world: World) -> None:
    request = world.submit(prompt(9), "m", max_tokens=3)
    world.send_submit(request)
    world.settle()
    assert world.cores["m"].results.num_output_tokens == 3
    world.send_submit(request)
    world.flush()
    assert world.refused == [("m", "attempt_over")]


def test_a_newer_attempt_ends_the_older_one(world: World) -> None:
    request = world.submit(prompt(9), "m", max_tokens=9, ignore_eos=True)
    world.until(lambda: len(request.output_ids) >= 3)
    request.attempt = 1
    world.send_submit(request)
    world.settle()
    core = world.cores["m"]
    assert (core.endings.num_cancelled, core.endings.num_finished) == (1, 1)
    request.attempt = 0
    world.send_submit(request)
    world.flush()
    assert world.refused == [("m", "attempt_over")]


def test_an_attempt_that_a_gateway_submits_for_another(world: World) -> None:
    core = world.cores["m"]
    request = world.submit(prompt(9), "m")
    packet = world.links[EDGE, "m"].pop()
    core.handle(Asked(Address("other", 4), packet.message, 1), world.now)
    assert core.books.attempts.of_gateway(Address(EDGE, 0))
    core.handle(PeerLost(Address(EDGE, 1)), world.now)
    assert len(core.books.attempts) == 0
    request.is_cancelled = True


@pytest.mark.parametrize("after", range(12))
def test_cancelled_at_any_moment_everything_is_free_within_a_step(world: World, after) -> None:
    request = world.submit(prompt(30), "m", max_tokens=20, ignore_eos=True)
    for _ in range(after):
        world.deliver(world.busy_links()[0])
    world.cancel(request)
    world.flush("w-m")
    assert world.cores["m"].pipeline.num_inflight <= 2
    world.flush()


def test_cancelling_what_is_unknown_is_answered_and_remembered(world: World) -> None:
    request = world.submit(prompt(9), "m")
    (submit,) = [world.links[EDGE, "m"].pop()]
    world.cancel(request)
    world.flush()
    world.links[EDGE, "m"].append(submit)
    world.flush()
    assert world.refused == [("m", "attempt_over")]


def test_other_questions_are_refused(world: World) -> None:
    assert world.cores["m"].handle(Asked(Address("x", 1), Load(num_running=0, num_waiting=0,
        num_free_pages=0, num_pages=0), 5), world.now) == [
        Refuse(5, "not_served", "a scheduler does not answer Load")
    ]  # fmt: skip
    assert world.cores["m"].handle(Told(Address("x", 1), Resend(streams=[])), world.now) == []
    assert world.cores["m"].handle(Told(Address("x", 1), Load), world.now) == []


# steps


def test_the_worker_never_waits_for_the_scheduler(world: World) -> None:
    request = world.submit(prompt(6), "m", max_tokens=9, ignore_eos=True)
    world.flush("w-m")
    first, second = world.links["m", "w-m"]
    assert [one.request_id for one in first.message.opens] == [request.request_id]
    assert second.message.opens == []
    sent = [(column(one.buffers, RowColumn.START), array("i", one.buffers[1]).tolist()) for one in (first, second)]
    assert sent == [([0], prompt(6)), ([6], [-1])]
    world.settle()
    assert world.workers["w-m"].num_rows == 9, "the last token is known to be the last: nothing is computed in vain"


def test_a_row_that_hangs_on_an_end_is_thrown_away_and_its_pages_wait_for_it(world: World) -> None:
    request = world.submit(stopping(3), "m", max_tokens=20)
    core = world.cores["m"]
    world.until(lambda: request.finish)
    world.flush("w-m")
    assert (core.books.running.num_leaving, core.pipeline.num_inflight, core.books.cache.num_sequences) == (1, 1, 1)
    world.settle()
    assert world.workers["w-m"].num_rows == 4


def test_pages_are_shared_only_once_their_step_is_acknowledged(world: World) -> None:
    world.submit(prompt(30), "m", max_tokens=1)
    world.flush("w-m")
    core = world.cores["m"]
    assert core.pipeline.num_inflight == 2
    assert core.books.cache.match(prompt(30)).num_tokens == 0
    world.deliver(("m", "w-m"))
    world.deliver(("w-m", "m"))
    assert core.books.cache.match(prompt(30)).num_tokens == 8


def test_depth_one_where_nothing_can_overlap() -> None:
    world = started(pipeline_depth=1)
    world.submit(prompt(6), "m", max_tokens=4)
    world.flush("w-m")
    assert len(world.links["m", "w-m"]) == 1


def test_a_small_worker_gets_small_steps() -> None:
    world = World(num_pages={"m": 60})
    world.links.clear()
    world.workers["w-m"].handle(AdoptArrived(Adopt(scheduler_epoch=1, next_step=1), None))
    adopted = Adopted(worker_epoch=1, numerics="", vocab_size=997, max_batch_tokens=6)
    world.event("m", Answered(("adopt", ""), adopted))
    for base in range(4):
        world.submit(prompt(9, base), "m")
    world.settle()
    assert max(tokens for _, tokens in world.workers["w-m"].row_counts) <= 6


def test_a_row_that_cannot_be_computed_fails_alone(world: World) -> None:
    world.workers["w-m"].poison = {901}
    bad = world.submit([*prompt(9), 901], "m")
    good = world.submit(prompt(9, 3), "m")
    retried = world.submit(prompt(9, 4), "m")
    world.flush("w-m")
    world.settle()
    assert bad.failure == "poisoned_request"
    assert good.finish
    assert retried.finish


def test_a_poisoned_prompt_fails_wherever_it_is_prefilled(pair: World) -> None:
    for worker in pair.workers.values():
        worker.poison = {901}
    bad = pair.submit([*prompt(20), 901, 5], "d", prefill="p")
    pair.settle()
    assert (bad.failure, pair.cores["p"].orders.num_failed) == ("poisoned_request", 1)


# pages run out


def crowded(**more) -> World:
    world = started(num_pages={"m": 31}, **more)
    world.cores["m"].books.growth.new_token_ratio = 0.1
    return world


def test_preempted_requests_are_computed_again_and_lose_nothing() -> None:
    world = crowded()
    core = world.cores["m"]
    for base in range(4):
        world.submit(prompt(20, base), "m", max_tokens=40, ignore_eos=True)
        core.books.growth.new_token_ratio = 0.1
        world.flush("w-m")
    world.settle()
    assert core.books.running.num_preemptions > 0
    assert core.admission.num_recomputed_tokens > 0
    assert all(request.num_cached_tokens == 0 for request in world.requests.values()), "usage is the first start's"
    assert (core.books.cache.num_query_tokens, core.books.cache.num_hit_tokens) == (4 * 20, 0), (
        "so is what the cache counts"
    )
    assert core.books.growth.new_token_ratio != 0.1


@pytest.mark.parametrize("seed", range(4))
def test_preemption_at_depth_one_and_two_gives_the_same_tokens(seed) -> None:
    outputs = []
    for depth in (1, 2):
        world = crowded(pipeline_depth=depth)
        for base in range(6):
            world.submit(prompt(10 + seed, base + seed), "m", max_tokens=30)
            world.cores["m"].books.growth.new_token_ratio = 0.1
        world.settle()
        world.check()
        outputs.append([request.output_ids for request in world.requests.values()])
    assert outputs[0] == outputs[1]


def running_alone(world: World, group: str) -> tuple[Request, SchedulerCore]:
    """A request that needs more pages than are expected of it."""
    lone = world.submit(prompt(40), group, max_tokens=70, ignore_eos=True)
    core = world.cores[group]
    world.until(lambda: core.results.num_output_tokens >= 1)
    core.books.growth.new_token_ratio = 0.1
    return lone, core


def test_the_last_one_takes_back_what_is_lent() -> None:
    world = started(num_pages={"d": 31, "p": 60})
    lone, core = running_alone(world, "d")
    other = world.submit(prompt(60, 5), "d", prefill="p", max_tokens=3)
    world.flush("w-p")
    assert (lone.finish, core.grants.num_failed) == ("length", 1)
    world.settle()
    assert other.finish


def test_the_last_one_waits_for_what_orders_hold() -> None:
    world = started(num_pages={"d": 60, "m": 31})
    lone, core = running_alone(world, "m")
    world.submit(prompt(60, 5), "d", prefill="m", max_tokens=3)
    world.flush(("m", "a-d"))
    assert not lone.finish
    assert (core.books.cache.num_available(), core.books.running.num_preemptions) == (0, 0)


def stuck_alone(world: World) -> None:
    """Whatever there is goes to the only sequence that runs, but it needs more: its own pages, held twice."""
    core = world.cores["m"]
    core.books.cache.num_available = lambda: 0
    for one in core.books.running.decoding.values():
        one.kv.reserve = lambda num_tokens: False


def test_the_last_one_starts_again_where_it_holds_pages_twice() -> None:
    world = started(pipeline_depth=1)
    request = world.submit(prompt(6), "m", max_tokens=9, ignore_eos=True)
    core = world.cores["m"]
    world.until(lambda: core.results.num_output_tokens >= 1)
    stuck_alone(world)
    world.flush()
    assert core.books.running.num_preemptions >= 1
    del core.books.cache.num_available
    world.members()
    world.settle()
    assert request.finish


def test_a_lone_request_that_cannot_go_on_is_handed_back() -> None:
    world = started(pipeline_depth=1)
    request = world.submit(prompt(6), "m", max_tokens=9, ignore_eos=True)
    core = world.cores["m"]
    world.until(lambda: core.results.num_output_tokens >= 1)
    (sequence,) = core.books.running.decoding.values()
    sequence.num_preemptions = 16
    stuck_alone(world)
    world.flush("edge")
    assert any(
        isinstance(packet.message, AttemptFailed) and packet.message.code == "preempted_for_good"
        for packet in world.links["m", EDGE]
    )
    del core.books.cache.num_available
    world.settle()
    assert request.finish


# streams


def test_resends_after_the_end_until_the_gateway_has_everything(world: World) -> None:
    request = world.submit(prompt(9), "m", max_tokens=5)
    core = world.cores["m"]
    while core.books.attempts.num_finished == 0:
        link = world.busy_links()[0]
        (world.drop if link == ("m", EDGE) else world.deliver)(link)
    world.links.clear()
    assert request.output_ids == []
    world.advance(world.now + 6)
    world.resend(request)
    world.advance(world.now + 6)
    world.settle()
    assert request.finish
    assert core.books.attempts.num_finished == 0


def test_what_nobody_asks_for_is_forgotten_after_a_lease(world: World) -> None:
    request = world.submit(prompt(9), "m", max_tokens=5)
    core = world.cores["m"]
    world.until(lambda: core.books.attempts.num_finished > 0)
    world.links.clear()
    world.advance(world.now + 11)
    assert len(core.books.attempts) == 0
    request.is_cancelled = True
    core.assert_idle()


def test_who_asks_for_what_is_unknown_is_told_so(world: World) -> None:
    gap = ResendFrom("r", 3, 0)
    (command,) = world.cores["m"].handle(Told(Address("x", 1), Resend(streams=[gap])), world.now)
    assert (command.actor_id, command.message.code, command.message.attempt) == ("x", "unknown_attempt", 3)


def told_to(world: World, actor_id: str, message: object) -> list[TokenBatch]:
    commands = world.event("m", message)
    return [one.message for one in commands if isinstance(one, Tell) and one.actor_id == actor_id]


def test_detokenizers_and_gateways_ask_differently(world: World) -> None:
    core = world.cores["m"]
    request = world.submit(prompt(9), "m", max_tokens=40, ignore_eos=True)
    world.until(lambda: len(request.output_ids) >= 4)
    ready = {"det": ReadyPeer("detokenizer", 1), EDGE: ReadyPeer("detokenizer", 1)}
    world.event("m", MembersChanged(ready))
    gateway, detokenizer = Address("gate", 1), Address(EDGE, 1)

    def ask(sender: Address, position: int, to: str = "") -> list[TokenBatch]:
        streams = [ResendFrom(request.request_id, 0, position)]
        return told_to(world, to or EDGE, Told(sender, Resend(streams=streams, detokenizer=to)))

    (batch,) = ask(detokenizer, 2)
    assert (batch.opens, batch.positions) == ([], [2])
    (batch,) = ask(detokenizer, 0)
    assert (batch.opens[0].output_ids, batch.positions) == ([], [0])
    (batch,) = ask(gateway, 2)
    assert (len(batch.opens[0].output_ids), batch.positions) == (2, [2])
    assert ask(gateway, 99) == [], "nothing to send yet"
    (batch,) = ask(gateway, 1, "det")
    assert batch.positions == [1]
    assert ask(gateway, 99, EDGE) == [], "what comes next goes there"
    (sequence,) = core.books.attempts
    assert sequence.detokenizer == EDGE
    unknown = Resend(streams=[], streams_unknown=[sequence.row_id, 99])
    assert told_to(world, EDGE, Told(Address("other", 1), unknown)) == []
    (batch,) = told_to(world, EDGE, Told(detokenizer, unknown))
    assert (batch.opens[0].output_ids, batch.positions) == ([], [0])
    world.cancel(request)
    world.flush()


def test_a_stop_string_ends_an_attempt_and_keeps_its_tokens(world: World) -> None:
    request = world.submit(prompt(9), "m", max_tokens=40, ignore_eos=True)
    world.until(lambda: len(request.output_ids) >= 4)
    refs = [AttemptRef(request.request_id, 0), AttemptRef("unknown", 0)]
    for _ in range(2):
        world.event("m", Told(Address(EDGE, 1), StopAt(attempts=refs)))
    core = world.cores["m"]
    assert (core.books.attempts.num_finished, core.endings.num_finished, len(core.books.running)) == (1, 1, 0)
    world.flush()
    assert 4 <= len(request.output_ids) <= 6
    world.resend(request, 0)
    world.flush()
    assert not request.finish, "the finish is the detokenizer's to tell"
    world.cancel(request)
    world.flush()


def test_a_lost_gateway_frees_everything(world: World) -> None:
    for base in range(4):
        world.submit(prompt(30, base), "m", max_tokens=40).is_cancelled = True
    world.flush("w-m")
    world.lose(EDGE)
    world.flush()
    world.cores["m"].assert_idle()


# handoffs, where only the core decides


def complete_without_token(world: World):
    """A handoff whose pages are all in and whose prefill scheduler dies before it says the token."""
    request = world.submit(prompt(39), "d", prefill="p", max_tokens=6)
    core = world.cores["d"]
    for _ in range(500):
        handoffs = list(core.books.loans.values())
        if handoffs and handoffs[0].is_pulled:
            break
        link = next(link for link in world.busy_links() if link != ("p", "d"))
        world.deliver(link)
    return request, core


def test_only_the_first_token_is_computed_where_all_pages_are_in(pair: World) -> None:
    request, core = complete_without_token(pair)
    pair.lose("p")
    (sequence,) = core.books.attempts
    assert sequence.stage is Stage.DECODE
    before = core.results.num_computed_tokens
    pair.settle()
    assert request.finish
    assert core.results.num_computed_tokens - before <= 6


def test_cancelled_while_all_pages_are_in(pair: World) -> None:
    request, _ = complete_without_token(pair)
    pair.cancel(request)
    pair.settle()
    pair.advance(pair.now + 20)


def test_cached_tokens_are_those_of_whoever_has_more(pair: World) -> None:
    pair.submit(prompt(39), "p", max_tokens=1)
    pair.submit(prompt(10), "d", max_tokens=1)
    pair.settle()
    request = pair.submit(prompt(39), "d", prefill="p", max_tokens=2)
    pair.settle()
    assert (request.num_cached_tokens, pair.cores["d"].grants.num_done) == (36, 1)


def test_cached_tokens_are_told_once_however_often_the_prompt_is_prefilled(pair: World) -> None:
    request, core = complete_without_token(pair)
    (sequence,) = core.books.attempts
    # It was told before it was preempted and handed off again.
    sequence.num_cached_tokens = 4
    pair.lose("p")
    pair.settle()
    assert request.num_cached_tokens == 4


def test_a_prompt_that_is_too_long_for_the_prefill_pool_is_prefilled_where_it_is_decoded() -> None:
    # 10 pages of 4 tokens there, 59 here.
    world = started(num_pages={"d": 60, "p": 11})
    requests = [world.submit(prompt(length, length), "d", prefill="p", max_tokens=30) for length in (40, 41, 200)]
    world.settle()
    # One order is served, two are refused, and nobody notices.
    assert (world.cores["d"].grants.num_done, world.cores["d"].grants.num_failed) == (1, 2)
    assert all(request.finish for request in requests)


def test_an_order_is_refused_where_it_cannot_be_served(world: World) -> None:
    core = world.cores["m"]
    spec = RequestSpec(Sampling(), NO_STOP)

    def ask(grant_id: str, tokens: list[int], **more) -> object:
        fields = {"num_prompt_tokens": len(tokens), "num_skip_tokens": 0, "spec": spec, "agent": "a", **more}
        order = PrefillOrder(grant_id=grant_id, request_id="r", attempt=0, token_ids=tokens, **fields)
        return core.handle(Asked(Address("d", 1), OrderPrefills(orders=[order]), 1), world.now)[0].message

    assert ask("g", prompt(256)).refused[0].code == "never_fits"
    assert ask("g", prompt(10), num_skip_tokens=1).refused[0].code == "bad_order"
    assert ask("g", prompt(10), spec=replace(spec, kind="mean")).refused[0].code == "bad_order"
    assert ask("g", prompt(10)) == PrefillsOrdered(accepted=["g"])
    core.handle(DrainAsked(), world.now)
    assert ask("g", prompt(10)) == PrefillsOrdered(accepted=["g"]), "it is held already"
    assert ask("h", prompt(10)).refused[0].code == "draining"
    core.handle(Asked(Address("d", 1), CancelPrefill(grant_ids=["g"]), 1), world.now)
    core.handle(Asked(Address("d", 1), CancelPrefill(grant_ids=["x"]), 1), world.now)
    core.assert_idle()


@pytest.mark.parametrize("how", ["lease", "timeout", "holder"])
def test_orders_that_nobody_wants_end_by_themselves(pair: World, how) -> None:
    pair.leave()
    pair.submit(prompt(39), "d", prefill="p", max_tokens=6).is_cancelled = True
    core = pair.cores["p"]
    pair.until(lambda: len(core.orders))
    pair.links.clear()
    if how == "holder":
        pair.event("p", PeerLost(Address("d", 1)))
        assert len(core.orders) == 0
    elif how == "timeout":
        core.books.deadlines.set(("order_timeout", "d#1/n.1"), pair.now)
        pair.event("p", Wake())
        assert core.orders.num_failed == 1
    else:
        pair.down.add("d")
        pair.flush()
        pair.advance(pair.now + 11)
        assert len(core.orders) == 0
    pair.links.clear()
    assert core.books.cache.num_sequences == 0 or core.pipeline.num_inflight


# workers


def test_ready_when_the_worker_is_ours_and_said_when_it_is_gone() -> None:
    world = World(num_pages={"m": 60})
    assert world.announced == []
    world.submit(prompt(5), "m")
    world.flush()
    assert world.announced == [("m", "ready", True)]
    world.restart_worker("m")
    assert world.announced[1:] == [("m", None, False)]
    world.flush()
    assert world.announced[2:] == [("m", None, True)]


def test_late_news_of_a_dead_worker_is_not_told_on(world: World) -> None:
    world.restart_worker("m")
    world.flush()
    announced = len(world.announced)
    world.event("m", PeerLost(Address("w-m", 1)))
    assert len(world.announced) == announced


def test_a_worker_that_was_replaced_without_a_word_is_found_in_the_members(world: World) -> None:
    request = world.submit(prompt(5), "m")
    world.flush("w-m")
    world.workers["w-m"].restart()
    world.links["m", "w-m"].clear()
    commands = world.event("m", MembersChanged({"w-m": ReadyPeer("worker", 2), EDGE: ReadyPeer("detokenizer", 1)}))
    assert [one.tag[0] for one in commands if isinstance(one, Ask)] == ["adopt"]
    world.members()
    world.settle()
    assert request.finish


def test_a_worker_that_is_away_for_too_long_sends_requests_elsewhere(pair: World) -> None:
    waiting = pair.submit(prompt(9), "p", max_tokens=3)
    pair.flush("w-p")
    handed = pair.submit(prompt(39), "d", prefill="p", max_tokens=3)
    pair.flush("w-p")
    pair.down.add("w-p")
    pair.lose("w-p")
    pair.advance(pair.now + 61)
    assert waiting.attempt == 0
    pair.flush()
    assert waiting.attempt == 1, "the gateway was told and tried again"
    pair.advance(pair.now + 61)
    pair.flush()
    assert waiting.attempt >= 2
    pair.down.clear()
    pair.members()
    pair.settle()
    assert (waiting.finish, handed.finish) != ("", "")


def test_asks_are_repeated_at_once_when_the_peer_is_back() -> None:
    world = World(num_pages={"m": 60})
    world.links.clear()
    core = world.cores["m"]
    world.event("m", AskFailed(("adopt", ""), "unreachable"))
    commands = core.handle(MembersChanged({"w-m": ReadyPeer("worker", 1)}), world.now)
    assert [one.tag[0] for one in commands if isinstance(one, Ask)] == ["adopt"]
    assert core.handle(MembersChanged({"w-m": ReadyPeer("worker", 1)}), world.now) == []


# the rest


def test_draining_refuses_what_is_new_and_finishes_what_is_here(world: World) -> None:
    request = world.submit(prompt(30), "m", max_tokens=9)
    world.flush("w-m")
    core = world.cores["m"]
    assert core.handle(DrainAsked(), world.now) == [Announce("draining", worker_ready=True, asks=(*ASK_NAMES, VECTORS))]
    assert core.handlers.is_draining
    late = world.submit(prompt(9), "m")
    world.flush("w-m")
    assert late.failure == "draining"
    assert late.why == "no worker group can take this request now: its scheduler ends"
    assert not core.is_drained
    world.settle()
    assert request.finish
    assert core.is_drained


def drain(world: World, scheduler: str, worker: str, *, is_drained: bool = True) -> None:
    if is_drained:
        world.event(scheduler, MembersChanged({}, {worker}))
        world.down.add(worker)
    else:
        world.down.discard(worker)
        world.workers[worker].restart()
        ready = {worker: ReadyPeer("worker", world.workers[worker].epoch), EDGE: ReadyPeer("detokenizer", 1)}
        world.event(scheduler, MembersChanged(ready))


def test_requests_do_not_wait_for_a_worker_that_was_drained(world: World) -> None:
    world.leave()
    request = world.submit(prompt(30), "m", max_tokens=50, ignore_eos=True)
    world.flush("w-m")
    drain(world, "m", "w-m")
    began = world.now
    late = world.submit(prompt(9), "m")
    world.flush("w-m")
    assert late.failure == "draining", "nothing new is taken"
    assert late.why == "no worker group can take this request now: its worker was drained by the operator"
    hopeless = world.submit(prompt(9_999), "m")
    world.flush("w-m")
    assert hopeless.failure == "never_fits", "no worker that comes back would take it"
    world.advance(began + 14.9)
    assert not request.failure, "it may only be renewed"
    world.advance(began + 15.1)
    world.flush()
    assert request.failure == "draining"


def test_nothing_waits_for_a_worker_that_stays_away_as_its_supervisor_says(world: World) -> None:
    running, ready = [], {EDGE: ReadyPeer("detokenizer", 1)}
    for base in range(2):
        running.append(world.submit(prompt(30, base), "m", max_tokens=50, ignore_eos=True))
        world.flush("w-m")
        # Known before or after the worker's own word.
        here = ready | {"w-m": ReadyPeer("worker", world.workers["w-m"].epoch)} if base else ready
        world.event("m", MembersChanged(here, () if base else {"w-m"}, {"w-m": world.workers["w-m"].epoch}))
        world.flush()
        assert running[base].failure == "draining", "others have it at once"
        late = world.submit(prompt(9), "m")
        world.flush("w-m")
        assert late.failure == "draining"
        # The next incarnation is there before it is known that it was to come.
        drained = {"w-m": world.workers["w-m"].epoch}
        world.workers["w-m"].restart()
        here = ready | {"w-m": ReadyPeer("worker", world.workers["w-m"].epoch)}
        world.event("m", MembersChanged(here, (), drained))
        world.event("m", MembersChanged(here))
        world.settle()
        again = world.submit(prompt(9), "m", max_tokens=3)
        world.settle()
        assert again.finish


def test_a_worker_that_is_renewed_in_time_goes_on_with_what_it_had(world: World) -> None:
    request = world.submit(prompt(30), "m", max_tokens=9, ignore_eos=True)
    world.flush("w-m")
    drain(world, "m", "w-m")
    world.advance(world.now + 5)
    drain(world, "m", "w-m", is_drained=False)
    world.settle()
    assert request.finish
    assert not request.failure
    late = world.submit(prompt(9), "m", max_tokens=3)
    world.settle()
    assert late.finish


def test_an_idle_scheduler_wants_nothing(world: World) -> None:
    core = world.cores["m"]
    # Its books are looked at once.
    world.advance(world.now + 10)
    assert core.next_deadline() is None
    assert core.handle(Wake(), world.now + 100) == []
    request = world.submit(prompt(9), "m", max_tokens=3)
    world.settle()
    assert request.finish
    world.advance(world.now + 20)
    assert core.next_deadline() is None


def test_load_is_published_when_it_changed_and_not_too_often(world: World) -> None:
    for base in range(8):
        world.submit(prompt(20, base), "m", max_tokens=20)
    world.settle()
    loads = [message for _, topic, message in world.published if topic == "load"]
    assert len(loads) == len(set(map(repr, loads)))
    assert len(loads) <= 3, "all of it took no time"
    world.advance(world.now + 1)
    last = [message for _, topic, message in world.published if topic == "load"][-1]
    assert (last.num_running, last.num_waiting, last.num_free_pages, last.num_pages) == (0, 0, 59, 59)


def test_cache_events_are_published_from_the_start(world: World) -> None:
    world.submit(prompt(9), "m", max_tokens=1)
    world.settle()
    published = [message for _, topic, message in world.published if topic == "kv_events"]
    assert all(isinstance(message, CacheEvents) for message in published)
    events = [event for message in published for event in message.events]
    assert events[0] == CacheCleared(group="m")
    assert [event.tokens for event in events if isinstance(event, PagesStored)] == [pack_tokens(prompt(9)[:8])]


def test_a_follower_that_missed_more_than_is_kept_is_told_the_whole_cache_again(world: World) -> None:
    world.submit(prompt(9), "m", max_tokens=1)
    world.settle()

    def restated(topic: str = "kv_events") -> list[str]:
        world.published.clear()
        world.event("m", FollowerReset(topic))
        world.advance(world.now + GATHER_S)
        return events()

    def events() -> list[str]:
        messages = [message for _, topic, message in world.published if topic == "kv_events"]
        return [type(event).__name__ for message in messages for event in message.events]

    assert restated("load") == []
    assert restated() == ["CacheCleared", "PagesStored"]
    assert restated() == [], "a follower that loses everything does not keep the scheduler at nothing else"
    world.advance(world.now + RESTATE_PAUSE_S + GATHER_S)
    assert events() == ["CacheCleared", "PagesStored"]


def test_what_became_of_prompts_is_told_by_who_prefills_and_by_who_decodes(pair: World) -> None:
    def fates(name: str, request_id: str) -> list[tuple[bool, str, list[tuple[str, int, int]]]]:
        asked = Asked(Address("supervisor", 1), FindFates(request_ids=[request_id]), 5)
        (reply,) = pair.cores[name].handle(asked, pair.now)
        assert isinstance(reply, Reply)
        return [
            (fate.is_order, fate.prefill, [(run.why, run.first, run.num) for run in fate.runs])
            for fate in reply.message.fates
        ]

    first = pair.submit(prompt(19), "d", prefill="p", max_tokens=4)
    pair.settle()
    pages = (19 - 1) // pair.cores["d"].books.config.page_size
    assert fates("d", first.request_id) == [(False, "p", [("no_store", 0, pages)])]
    assert fates("p", first.request_id) == [(True, "", [("no_store", 0, pages)])]
    again = pair.submit(prompt(19), "d", prefill="p", max_tokens=4)
    pair.settle()
    assert fates("d", again.request_id) == [(False, "", [("cached", 0, pages)])]
    assert fates("p", again.request_id) == fates("p", "another") == []


def test_what_waits_is_load_too(world: World) -> None:
    requests = [world.submit(prompt(5), "m", max_tokens=4) for _ in range(24)]
    world.flush("w-m")
    stats, cache = world.cores["m"].stats(), world.cores["m"].books.cache
    held = (cache.num_pages - cache.num_available()) * cache.page_size
    assert held
    assert stats["mesh_scheduler_num_waiting"] > 0
    assert stats["mesh_scheduler_load_tokens"] == held + 5 * stats["mesh_scheduler_num_waiting"]
    world.settle()
    assert all(request.finish for request in requests)


def test_figures(world: World) -> None:
    request = world.submit(prompt(9), "m", max_tokens=4)
    world.flush("w-m")
    stats = world.cores["m"].stats()
    assert (stats["mesh_scheduler_num_running"], stats["mesh_scheduler_num_waiting"]) == (1, 0)
    assert stats['mesh_scheduler_pages{state="running"}'] > 0
    assert 0 < stats["mesh_scheduler_kv_usage_ratio"] < 1
    cache = world.cores["m"].books.cache
    held = stats["mesh_scheduler_load_tokens"]
    assert held == (cache.num_pages - cache.num_available()) * cache.page_size >= 9
    with pytest.raises(AssertionError, match="1 running sequences"):
        world.cores["m"].assert_idle()
    world.settle()
    stats = world.cores["m"].stats()
    assert stats["mesh_scheduler_output_tokens_total"] == len(request.output_ids)
    assert (stats["mesh_scheduler_prompt_tokens_total"], stats["mesh_scheduler_kv_usage_ratio"]) == (9, 0)
    assert stats["mesh_scheduler_load_tokens"] == 0, "what only the cache holds is no load"
    assert all(isinstance(value, float) for value in stats.values())


def test_a_page_in_two_books_is_named(world: World) -> None:
    world.leave()
    core = world.cores["m"]
    # There is no public way to what must never be.
    core.books.cache.blocks.allocator._states[5] = core.books.cache.blocks.allocator.state(0)
    with pytest.raises(AssertionError, match="page 5 is"):
        core.assert_idle()


def test_one_attempt_that_is_refused_does_nothing_to_those_beside_it() -> None:
    world = started(max_waiting=2)
    world.leave()
    core = world.cores["m"]
    prompts = ("a", prompt(5)), ("bad", [5, 997]), ("b", prompt(6)), ("c", prompt(7)), ("a", prompt(5))
    (reply,) = core.handle(Asked(Address("g", 1), submits(*prompts, max_tokens=3), 1), world.now)
    # The one given twice is a repeat, and the third that is good finds the queue full.
    assert [ref.request_id for ref in reply.message.held] == ["a", "b", "a"]
    refused = {one.request_id: one.code for one in reply.message.refused}
    assert refused == {"bad": "bad_token_id", "c": "overloaded"}

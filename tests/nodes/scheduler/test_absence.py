"""A worker is dead: gateways are told for how long and who is suspected, and what is moved kills nobody twice."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.address import Address
from mesh.runtime.effects import Reply, Tell
from nodes.protocol import Adopted, CancelAttempts, StepPlan, Submit, Suspected, WorkerAway
from nodes.request import AttemptRef
from nodes.scheduler.events import Asked, MembersChanged, ReadyPeer, WorkerDied
from nodes.scheduler.finish.results import POISONED
from nodes.scheduler.worker_link.absence import LATE_CANCELS_S
from tests.nodes.scheduler.scheduler_world import EDGE, Request, World, prompt
from tests.nodes.scheduler.test_worker_deaths import Deadly

START_S = 0.4


class AwayWorld(World):
    """Workers say how long their start took, the edge is a gateway and keeps what it is told, and is told of deaths."""

    def __init__(self, start_s: float = START_S, **more) -> None:
        self.told: list[tuple[str, WorkerAway]] = []
        super().__init__(**more)
        for name, worker in self.workers.items():
            worker.adopted = lambda worker=worker: self.said(worker.epoch, start_s)
            self.restart_worker(name.removeprefix("w-"))
        self.members()
        self.flush()

    @staticmethod
    def said(epoch: int, start_s: float) -> Adopted:
        return Adopted(worker_epoch=epoch, numerics="bits", vocab_size=0, start_s=start_s)

    def die(self, name: str) -> list[WorkerAway]:
        """The worker dies; what the gateway is told of it."""
        old = self.workers[f"w-{name}"].epoch
        self.restart_worker(name)
        return away(self.event(name, WorkerDied(Address(f"w-{name}", old))))

    def at_edge(self, sender, message) -> None:
        if isinstance(message, WorkerAway):
            self.told.append((sender.actor_id, message))
        else:
            super().at_edge(sender, message)


def away(commands, to: str = EDGE) -> list[WorkerAway]:
    told = [one.message for one in commands if isinstance(one, Tell) and one.actor_id == to]
    return [one for one in told if isinstance(one, WorkerAway)]


def in_steps(world: World, name: str = "m") -> list[Request]:
    """Three requests, of which two have two outputs and steps in flight, and one waits for its first."""
    requests = [world.submit(prompt(9, base), name, max_tokens=8, ignore_eos=True) for base in range(2)]
    world.until(lambda: all(len(request.output_ids) >= 2 for request in requests))
    requests.append(world.submit(prompt(9, 7), name, max_tokens=8, ignore_eos=True))
    world.flush(f"w-{name}")
    assert world.cores[name].pipeline.num_inflight
    return requests


def test_gateways_are_told_for_how_long_and_who_was_in_unanswered_steps() -> None:
    world = AwayWorld(num_pages={"m": 60})
    in_steps(world)
    inflight = {one.request_id: one for one in world.cores["m"].pipeline.unanswered()}
    (told,) = world.die("m")
    assert told.returns_in_s == START_S
    assert {one.request_id for one in told.suspects} == set(inflight)
    for one in told.suspects:
        sequence = inflight[one.request_id]
        assert (one.attempt, one.deaths) == (0, 1)
        assert one.cleared_at > sequence.num_output_tokens, "what the steps would have drawn, and one at least"
    world.settle()


def test_who_has_left_meanwhile_is_suspected_too_for_it_may_be_about_to_move() -> None:
    world = AwayWorld(num_pages={"m": 60})
    *others, _ = in_steps(world)
    world.cancel(others[0])
    world.flush("w-m", ("w-m", "m"))
    (told,) = world.die("m")
    assert others[0].request_id in {one.request_id for one in world.cores["m"].pipeline.unanswered()}
    assert {one.request_id for one in told.suspects} >= {one.request_id for one in others}
    world.settle()


def test_what_died_is_told_once_and_again_while_it_stays_away() -> None:
    world = AwayWorld(num_pages={"m": 60})
    in_steps(world)
    epoch = world.workers["w-m"].epoch
    world.down.add("w-m")
    world.lose("w-m", epoch)
    began = world.now
    world.event("m", WorkerDied(Address("w-m", epoch)))
    assert away(world.event("m", WorkerDied(Address("w-m", epoch)))) == [], "of the same death"
    world.advance(began + 8.5 * START_S)
    world.flush()
    times = [one.returns_in_s for _, one in world.told]
    assert times == pytest.approx([START_S, START_S, 2 * START_S, 4 * START_S, 8 * START_S])
    world.down.clear()
    world.restart_worker("m")
    world.settle()
    num = len(world.told)
    world.advance(world.now + 60.0)
    assert len(world.told) == num, "it is back"


def test_who_is_only_cut_off_or_was_replaced_is_not_dead() -> None:
    world = AwayWorld(num_pages={"m": 60})
    in_steps(world)
    epoch = world.workers["w-m"].epoch
    assert away(world.event("m", WorkerDied(Address("w-m", epoch)))) == [], "it is adopted: its link still holds"
    world.lose("w-m", epoch)
    assert away(world.event("m", WorkerDied(Address("w-m", epoch - 1)))) == [], "an incarnation before it"
    assert away(world.event("m", WorkerDied(Address("w-x", epoch)))) == [], "another group's"
    world.settle()


@pytest.mark.parametrize("start_s", [0.0, -1.0, math.nan, math.inf])
def test_a_start_time_that_is_none_is_not_passed_on(start_s: float) -> None:
    world = AwayWorld(start_s, num_pages={"m": 60})
    in_steps(world)
    (told,) = world.die("m")
    assert told.returns_in_s == 0.0
    assert told.suspects, "who was computed is said all the same"
    world.settle()


def test_every_gateway_is_told_for_its_route_may_be_older_than_the_death() -> None:
    world = AwayWorld(num_pages={"m": 60})
    world.event("m", MembersChanged(world.ready() | {"g7": ReadyPeer("gateway", 1)}))
    old = world.workers["w-m"].epoch
    world.restart_worker("m")
    commands = world.event("m", WorkerDied(Address("w-m", old)))
    assert away(commands, "g7") == [WorkerAway(returns_in_s=START_S)]
    assert away(commands) == [], "a detokenizer, without attempts here"


def test_rows_that_nobody_wants_any_more_are_not_sent_to_the_next_worker() -> None:
    world = AwayWorld(num_pages={"m": 60})
    *others, _ = in_steps(world)
    moved = others[0]
    world.die("m")
    world.event("m", MembersChanged(world.ready()))
    world.cancel(moved)
    world.flush("w-m", ("w-m", "m"))
    while world.cores["m"].pipeline.adopted is None:
        world.deliver(("m", "w-m"))
        world.deliver(("w-m", "m"))
    plans = [one.message for one in world.links["m", "w-m"] if isinstance(one.message, StepPlan)]
    opened = {one.request_id for plan in plans for one in plan.opens}
    assert others[1].request_id in opened
    assert moved.request_id not in opened
    assert world.cores["m"].deaths.next_suspect() is None, "one death makes nobody a suspect"
    world.settle()


def test_a_cancel_that_comes_too_late_for_a_step_is_acknowledged_when_its_outcome_is_told() -> None:
    """A gateway moves it, and the worker is back already: it is computed once more, and the worker dies again."""
    world = AwayWorld(num_pages={"m": 60})
    *others, _ = in_steps(world)
    moved, ref = others[0], AttemptRef(others[0].request_id, 0)

    def cancel() -> list[AttemptRef]:
        asked = Asked(Address(EDGE, 1), CancelAttempts(attempts=[ref]), "call")
        commands = world.cores["m"].handle(asked, world.now)
        (reply,) = [one for one in commands if isinstance(one, Reply)]
        world.perform(world.cores["m"], [one for one in commands if one is not reply])
        return reply.message.attempts

    world.die("m")
    world.until(lambda: world.cores["m"].pipeline.adopted is not None)
    moved.is_cancelled = True
    assert cancel() == [], "the worker computes it"
    (told,) = world.die("m")
    assert {one.request_id: one.deaths for one in told.suspects}[moved.request_id] == 2
    assert cancel() == [ref], "nobody computes it again"
    world.settle()


def test_a_cancel_is_acknowledged_at_once_when_gateways_move_nothing_any_more() -> None:
    world = AwayWorld(num_pages={"m": 60})
    in_steps(world)
    core = world.cores["m"]
    refs = [AttemptRef(one.request_id, one.attempt) for one in core.pipeline.unanswered()]
    assert core.absence.may_die_of(refs, world.now) == set(), "its worker has not died"
    world.die("m")
    assert core.absence.may_die_of(refs, world.now) == set(), "it is dead"
    until = world.now + START_S + LATE_CANCELS_S
    world.until(lambda: core.pipeline.adopted is not None)
    assert core.absence.may_die_of(refs, until) == set(refs)
    assert core.absence.may_die_of([AttemptRef("another", 0)], until) == set()
    assert core.absence.may_die_of(refs, until + 0.01) == set()
    world.settle()


def move(world: World, request: Request, to: str, suspects: list[Suspected], prefill: str = "") -> None:
    """What a gateway does with a request of a group whose worker is dead."""
    world.cancel(request)
    request.is_cancelled, request.scheduler, request.prefill = False, to, prefill
    request.attempt += 1
    deaths = {one.request_id: one for one in suspects}.get(request.request_id)
    send = world.ask_from_edge

    def marked(scheduler: str, message) -> None:
        if isinstance(message, Submit) and deaths is not None:
            message = msgspec.structs.replace(message, deaths=deaths.deaths, cleared_at=deaths.cleared_at)
        send(scheduler, message)

    world.ask_from_edge = marked
    try:
        world.send_submit(request)
    finally:
        world.ask_from_edge = send


@pytest.mark.parametrize("prefill", ["", "p"])
def test_a_request_that_kills_is_poisoned_after_three_workers_in_all(prefill: str) -> None:
    deadly = Deadly(m=60, d=60, p=60)
    world = deadly.world
    others = [world.submit(prompt(9 + base, base), name, max_tokens=6) for base, name in enumerate("mmdd")]
    killer = world.submit(prompt(21, 9), "m", max_tokens=6)
    deadly.killers = dict.fromkeys("mdp", killer.request_id)
    old = world.workers["w-m"].epoch
    while not deadly.num_deaths:
        for link in world.busy_links():
            if world.links[link] and not deadly._dies(link):
                world.deliver(link)
    suspects = [one.suspected() for one in world.cores["m"].pipeline.unanswered()]
    assert world.workers["w-m"].epoch == old + 1
    assert {killer.request_id: 1}.items() <= {one.request_id: one.deaths for one in suspects}.items()
    move(world, killer, "d", suspects, prefill)
    # The cancel is there before the next worker: it is asked to adopt when this has been heard.
    world.flush("w-m", "w-d", "w-p", EDGE)
    deadly.run()
    assert killer.failure == POISONED
    assert killer.why.startswith("workers, the last of them")
    assert deadly.num_deaths == 3
    assert all(request.finish for request in others)


def test_a_request_that_comes_with_two_deaths_is_alone_from_its_first_step_on() -> None:
    deadly = Deadly(m=60)
    world = deadly.world
    others = [world.submit(prompt(9 + base, base), "m", max_tokens=6) for base in range(3)]
    killer = world.submit(prompt(21, 9), "m", max_tokens=6)
    world.links[EDGE, "m"].pop()
    deadly.killers = {"m": killer.request_id}
    move(world, killer, "m", [Suspected(request_id=killer.request_id, attempt=0, deaths=2, cleared_at=1)])
    deadly.run()
    assert (killer.failure, deadly.num_deaths) == (POISONED, 1)
    assert all(request.finish for request in others)


@pytest.mark.parametrize(("deaths", "num_others"), [(1, 0), (2, 0), (2, 2)])
def test_the_third_death_alone_ends_it_before_it_could_move(deaths: int, num_others: int) -> None:
    world = AwayWorld(num_pages={"m": 60})
    requests = [world.submit(prompt(9, base), "m", max_tokens=8, ignore_eos=True) for base in range(1 + num_others)]
    world.until(lambda: all(one.output_ids for one in requests))
    world.flush("w-m")
    request, *others = requests
    first, *neighbours = world.cores["m"].pipeline.unanswered()
    assert (first.request_id, len(neighbours)) == (request.request_id, num_others)
    first.num_deaths, is_over = deaths, deaths == 2 and not others
    epoch = world.workers["w-m"].epoch
    world.down.add("w-m")
    world.lose("w-m", epoch)
    for _ in range(2):
        world.event("m", WorkerDied(Address("w-m", epoch)))
    world.flush()
    assert request.failure == (POISONED if is_over else "")
    # Told of one that is over, too, and after its failure, so that its gateway knows no such request any more.
    assert request.request_id in {one.request_id for _, told in world.told for one in told.suspects}
    world.down.clear()
    world.restart_worker("m")
    world.settle()
    assert world.cores["m"].deaths.num_poisoned == is_over
    assert all(one.finish for one in others)
    assert bool(request.finish) != is_over


def test_a_suspect_that_waits_holds_up_nobody() -> None:
    world = AwayWorld(num_pages={"m": 60}, max_running=1)
    first = world.submit(prompt(9), "m", max_tokens=6, ignore_eos=True)
    world.until(lambda: first.output_ids)
    second = world.submit(prompt(9, 3), "m", max_tokens=6, ignore_eos=True)
    world.links[EDGE, "m"].pop()
    move(world, second, "m", [Suspected(request_id=second.request_id, attempt=0, deaths=2, cleared_at=1)])
    world.deliver((EDGE, "m"))
    world.deliver((EDGE, "m"))
    assert world.cores["m"].deaths.next_suspect() is None
    world.until(lambda: first.finish)
    world.until(lambda: second.finish)
    world.settle()


@given(st.integers(0, 3), st.integers(0, 6))
def test_a_moved_request_is_cleared_once_it_has_got_past_the_steps(deaths: int, cleared_at: int) -> None:
    world = AwayWorld(num_pages={"m": 60})
    request = world.submit(prompt(21), "m", max_tokens=8, ignore_eos=True)
    world.links[EDGE, "m"].clear()
    suspects = [Suspected(request_id=request.request_id, attempt=0, deaths=deaths, cleared_at=cleared_at)]
    move(world, request, "m", suspects)
    while not request.is_over:
        sequence = world.cores["m"].books.attempts.find(request.request_id, 1)
        if sequence is not None and sequence.num_computed:
            is_past = sequence.num_output_tokens >= cleared_at
            assert sequence.num_deaths == (0 if is_past else deaths)
        world.step()
    assert request.finish
    world.settle()

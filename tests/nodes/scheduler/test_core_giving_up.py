"""What a scheduler gives up, and when: handoffs that take too long, a worker that stays away, ends nobody fetches."""

from mesh.runtime.effects import Answered
from nodes.protocol import AttemptsSubmitted
from nodes.scheduler.events import DrainAsked
from nodes.scheduler.sequence import Stage
from tests.nodes.scheduler.scheduler_world import EDGE, prompt, started

PAIR = {"d": 60, "p": 60}


def test_a_handoff_that_takes_too_long_is_prefilled_here() -> None:
    world = started(num_pages=PAIR, handoff_timeout_s=5.0)
    request = world.submit(prompt(39), "d", prefill="p", max_tokens=3)
    # The prefill scheduler holds the order and says so, but its worker does not get to it.
    world.flush("w-p")
    core = world.cores["d"]
    unexpected = AttemptsSubmitted(held=[])
    assert world.event("d", Answered(("open_grant", "1"), unexpected)) == []
    while core.books.loans:
        world.advance(world.now + 0.5)
        world.flush("w-p")
    assert core.grants.num_failed == 1
    world.settle()
    assert request.finish


def test_only_what_needs_the_worker_is_given_up_with_it() -> None:
    world = started(num_pages=PAIR, handoff_timeout_s=1000.0)
    finished = world.submit(prompt(5), "d", max_tokens=1)
    world.flush(("d", EDGE))
    handed = world.submit(prompt(39), "d", prefill="p", max_tokens=3)
    world.flush("w-p", ("d", EDGE))
    for worker in ("w-d", "w-p"):
        world.down.add(worker)
        world.lose(worker)
    d, p = world.cores["d"], world.cores["p"]
    assert {one.stage for one in d.books.attempts} == {Stage.ENDED, Stage.HANDOFF}
    d.deaths.away_for_good(world.now)
    assert ({one.stage for one in d.books.attempts}, d.endings.num_failed) == ({Stage.ENDED, Stage.HANDOFF}, 0)
    p.deaths.away_for_good(world.now)
    assert (p.orders.num_failed, p.orders.running()) == (1, [])
    world.down.clear()
    world.members()
    world.settle()
    assert (finished.finish, handed.finish) == ("length", "length")


def test_draining_ends_without_a_worker_that_died_and_is_not_started_again() -> None:
    world = started()
    world.leave()
    request = world.submit(prompt(30), "m", max_tokens=50, ignore_eos=True)
    world.flush("w-m")
    core = world.cores["m"]
    world.event("m", DrainAsked())
    world.down.add("w-m")
    world.lose("w-m")
    assert core.pipeline.num_inflight
    assert not core.is_drained, "it may be back in time"
    world.advance(world.now + core.books.config.worker_lost_timeout_s)
    world.flush()
    assert core.endings.num_failed == 1
    assert request.failure == "draining", "it was given back, and came again"
    assert core.pipeline.num_inflight
    assert core.is_drained


def test_only_so_many_are_kept_after_their_end() -> None:
    world = started(max_finished=2)
    requests = [world.submit(prompt(9, base), "m", max_tokens=2) for base in range(4)]
    core = world.cores["m"]
    world.flush(("m", EDGE))
    assert (core.endings.num_finished, core.books.attempts.num_finished, len(core.books.attempts)) == (4, 2, 2)
    world.settle()
    assert [request.finish for request in requests] == ["length"] * 4

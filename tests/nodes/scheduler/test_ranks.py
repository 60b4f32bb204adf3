"""A group of tensor-parallel ranks as the scheduler sees it: answers in any order, lost, repeated, of other groups."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.cache.allocator import PageState
from mesh.address import Address
from nodes.protocol import Adopt, Adopted, Fence, RowError, StepResult
from nodes.roles import WORKER
from nodes.scheduler.config import ConfigError, SchedulerConfig
from nodes.scheduler.core import SchedulerCore
from nodes.scheduler.events import ReadyPeer
from nodes.scheduler.worker_link.ranks import AdoptedRanks
from tests.nodes.scheduler.scheduler_world import PAGE, Packet, Worker, World, prompt

TOKENS = [5, -1, 7]


def answer(worker_epoch: int, group_epoch: int, **fields: Any) -> Adopted:
    return Adopted(worker_epoch=worker_epoch, group_epoch=group_epoch, numerics="n", vocab_size=9, **fields)


def result(step: int = 1, tokens: list[int] = TOKENS, **fields: Any) -> StepResult:
    return StepResult(scheduler_epoch=1, step=step, token_ids=tokens, **fields)


def test_a_group_is_whole_when_all_ranks_answered_for_it() -> None:
    group = AdoptedRanks(("w", "w.1", "w.2"))
    assert group.take_adopted(1, answer(7, 3)) == []
    assert group.take_adopted(0, answer(3, 3, max_batch_tokens=64)) == []
    assert group.whole() is None
    assert group.rank_of(Address("w", 3)) == -1, "steps are not answered by half a group"
    assert group.take_adopted(2, answer(1, 3)) == []
    whole = group.whole()
    assert (whole.worker_epoch, whole.group_epoch, whole.max_batch_tokens) == (3, 3, 64)
    assert [group.rank_of(Address("w.1", epoch)) for epoch in (6, 7, 8)] == [-1, 1, -1]
    assert group.is_older("w.1", 8)
    assert not group.is_older("w.1", 7)
    assert not group.is_older("x", 9)


def test_who_answers_for_an_earlier_group_is_asked_again() -> None:
    group = AdoptedRanks(("w", "w.1", "w.2"))
    assert group.take_adopted(0, answer(3, 3)) == []
    assert group.take_adopted(1, answer(7, 3)) == []
    assert sorted(group.take_adopted(2, answer(2, 4))) == [0, 1], "rank 0 has been made again, and has not said so yet"
    assert group.take_adopted(1, answer(7, 3)) == [1], "it has not noticed either"
    assert group.take_adopted(1, answer(8, 4)) == []
    assert group.take_adopted(0, answer(4, 4)) == []
    assert group.whole() is not None


def test_a_rank_zero_that_names_another_group_than_its_own_is_not_believed() -> None:
    group = AdoptedRanks(("w", "w.1"))
    assert group.take_adopted(0, answer(3, 0)) == [0]
    assert group.take_adopted(1, answer(3, 0)) == []
    assert group.whole() is None


def test_one_rank_answers_for_itself() -> None:
    group = AdoptedRanks(("w",))
    assert group.take_adopted(0, answer(3, 0)) == []
    whole = group.whole()
    assert whole.worker_epoch == 3
    one = result()
    assert group.gather(0, one) is one


@given(order=st.permutations([(step, rank) for step in (1, 2) for rank in range(3)]), twice=st.booleans())
def test_results_of_all_ranks_make_one_in_any_order(order: list[tuple[int, int]], twice: bool) -> None:
    group = AdoptedRanks(("w", "w.1", "w.2"))
    done: dict[int, Any] = {}
    seen: set[tuple[int, int]] = set()
    for step, rank in order:
        seen.add((step, rank))
        for one in (result(step, elapsed_s=rank), result(step, [8, -1, 8]))[: 1 + twice]:
            if step in done:
                break
            if (gathered := group.gather(rank, one)) is not None:
                assert {(step, other) for other in range(3)} <= seen
                done[step] = gathered
    assert done == {step: result(step, elapsed_s=2) for step in (1, 2)}


def test_a_row_that_failed_at_one_rank_has_failed() -> None:
    group = AdoptedRanks(("w", "w.1"))
    first, second = RowError(0, "corrupt_page", "a"), RowError(2, "corrupt_page", "b")
    assert group.gather(1, result(tokens=[-1, -1, 7], errors=[first])) is None
    gathered = group.gather(0, result(tokens=[5, -1, -1], errors=[second]))
    assert gathered.errors == [first, second]


@pytest.mark.parametrize(("tokens", "words"), [([5, -1, 8], "drew 7 and 8 for row 2"), ([5, -1], "3 and 2 tokens")])
def test_other_tokens_are_a_disagreement(tokens: list[int], words: str) -> None:
    group = AdoptedRanks(("w", "w.1"))
    assert group.gather(0, result()) is None
    gathered = group.gather(1, result(tokens=tokens))
    assert words in gathered.text


def test_workers_are_the_worker_and_others() -> None:
    with pytest.raises(ConfigError, match="each worker only once"):
        SchedulerConfig(group="g", worker="w", workers=("x", "w"), agent="a", context_length=9)


class RankWorld(World):
    """A world with one group of ranks. Who dies is back at once, and takes part again when all others have died too."""

    def __init__(self, size: int, **settings_: Any) -> None:
        self.ids = tuple(f"w-m.{rank}" if rank else "w-m" for rank in range(size))
        self.group_of: dict[str, int] = {}
        super().__init__(num_pages={"m": 40}, workers=self.ids, **settings_)

    def add(self, name: str, num_pages: int, epoch: int = 1) -> SchedulerCore:
        core = super().add(name, num_pages, epoch)
        for actor_id in self.ids:
            self.workers[actor_id] = RankWorker(self, actor_id, {page: [-9] * PAGE for page in range(num_pages)})
        self.form()
        return core

    def form(self) -> None:
        if not self.group_of:
            self.group_of = dict.fromkeys(self.ids, self.workers[self.ids[0]].epoch)

    def kill(self, actor_id: str, *, said: bool = True) -> None:
        old = self.workers[actor_id].epoch
        self.workers[actor_id].restart()
        self.group_of.pop(actor_id, None)
        for link, packets in self.links.items():
            if actor_id in link:
                packets.clear()
        if said:
            self.lose(actor_id, old)
        if not self.group_of:
            self.form()
            self.members()

    def notice(self) -> None:
        """All who are left of a broken group end."""
        while 0 < len(self.group_of) < len(self.ids):
            self.kill(next(iter(self.group_of)))

    def at_worker(self, name: str, packet: Packet) -> None:
        message = packet.message
        if isinstance(message, Fence):
            if message.worker_epoch == self.workers[name].epoch:
                self.kill(name)
                self.notice()
        elif name not in self.group_of:
            if isinstance(message, Adopt):
                self.refuse(packet, "not_ready")
        else:
            super().at_worker(name, packet)

    def ready(self) -> dict[str, ReadyPeer]:
        return super().ready() | {name: ReadyPeer(WORKER, self.workers[name].epoch) for name in self.group_of}

    def refuse(self, packet: Packet, code: str) -> None:
        self.calls[packet.ask_id] = packet
        super().refuse(packet, code)


class RankWorker(Worker):
    """Fails the test if it writes pages that the scheduler has given back."""

    def __init__(self, world: RankWorld, actor_id: str, memory: dict[int, list[int]]) -> None:
        super().__init__(memory)
        self.world, self.actor_id = world, actor_id

    def adopted(self) -> Adopted:
        return msgspec.structs.replace(super().adopted(), group_epoch=self.world.group_of[self.actor_id])

    def write(self, pages: Sequence[int], start: int, tokens: Sequence[int]) -> None:
        allocator = self.world.cores["m"].books.cache.blocks.allocator
        written = range(start // PAGE, (start + len(tokens) - 1) // PAGE + 1)
        assert all(allocator.state(pages[index]) is PageState.RUNNING for index in written), "written when given back"
        super().write(pages, start, tokens)


def test_a_rank_that_answers_for_a_group_that_is_over_is_asked_again() -> None:
    world = RankWorld(2)
    world.group_of["w-m.1"] -= 1
    world.flush()
    request = world.submit(prompt(9), "m", max_tokens=4, ignore_eos=True)
    world.flush()
    assert request.output_ids == []
    world.group_of["w-m.1"] += 1
    world.settle()
    assert request.finish == "length"


def test_a_step_is_over_when_the_last_rank_is_done() -> None:
    world = RankWorld(3)
    world.flush()
    request = world.submit(prompt(9), "m", max_tokens=4, ignore_eos=True)
    world.flush("w-m.1")
    assert (request.output_ids, world.cores["m"].pipeline.num_inflight) == ([], 2)
    world.settle()
    assert request.finish == "length"


def test_ranks_that_disagree_are_fenced_and_nothing_wrong_goes_out() -> None:
    world = RankWorld(2)
    world.flush()
    liar = world.workers["w-m.1"]

    def lying(result: StepResult) -> list[StepResult]:
        lie = [token if token < 0 else 3 for token in result.token_ids]
        return [result if liar.epoch > 1 else msgspec.structs.replace(result, token_ids=lie)]

    liar.told = lying
    request = world.submit(prompt(9), "m", max_tokens=6)
    world.settle()
    world.check()
    assert request.finish
    assert [world.workers[one].epoch for one in world.ids] == [2, 2], "both: nobody knows who is right"
    figures = world.cores["m"].stats()
    assert figures['mesh_scheduler_results_refused_total{reason="disagreed"}'] == 1
    assert figures["mesh_scheduler_workers_fenced_total"] == 1


def test_the_death_of_one_rank_counts_once() -> None:
    """Whoever was in its steps is no suspect, although several workers of its died."""
    world = RankWorld(3)
    world.flush()
    request = world.submit(prompt(9), "m", max_tokens=8, ignore_eos=True)
    world.flush("w-m.2")
    world.kill("w-m.2")
    world.flush()
    world.notice()
    world.settle()
    world.check()
    assert (request.finish, request.attempt) == ("length", 0)
    assert world.cores["m"].deaths.next_suspect() is None
    assert world.cores["m"].pipeline.num_recomputed_tokens > 0


@given(seed=st.integers(0, 100_000), size=st.sampled_from([2, 2, 3]))
@settings(max_examples=150, deadline=None)
def test_groups_under_deaths_and_losses(seed: int, size: int) -> None:
    """Every request ends with its own tokens; no page is written that was given back; nothing is held in the end."""
    dice = random.Random(seed)
    world = RankWorld(size, max_running=dice.choice([2, 16]))
    for base in range(dice.randrange(1, 6)):
        world.submit(prompt(dice.randrange(1, 30), base % 3), "m", max_tokens=dice.randrange(1, 12))
    num_deaths = dice.randrange(3)
    for _ in range(dice.randrange(200)):
        links = world.busy_links()
        luck = dice.random()
        if luck < 0.02 and num_deaths:
            num_deaths -= 1
            world.kill(dice.choice(world.ids), said=dice.random() < 0.7)
        elif luck < 0.06:
            world.notice()
        elif luck < 0.1:
            world.advance(world.now + dice.choice([0.1, 1.0, 3.0]))
        elif luck < 0.15 and world.requests:
            world.cancel(dice.choice(list(world.requests.values())))
        elif links:
            link = dice.choice(links)
            lossy = any(name in world.ids for name in link)
            if lossy and luck < 0.3:
                dice.choice([world.drop, world.repeat])(link)
            else:
                world.deliver(link)
    world.notice()
    world.settle()
    world.check()

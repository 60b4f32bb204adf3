"""Releasing groups' memory, decided: by event lists, and by a machine whose holders die and lose what they hear."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.layout import KVLayout
from kvstore.protocol import PoolHandle
from mesh.address import Address
from mesh.runtime.effects import Answered, Ask, Asked, AskFailed, Refuse, Reply
from nodes.kv_agent.memory.core import ASK_TIMEOUT_S, HELD, RELEASING, RESUMING, MemoryCore
from nodes.kv_agent.memory.events import (
    CopiesEnded,
    DesiredState,
    FreePool,
    HolderLost,
    HolderSeen,
    MakePool,
    Mapped,
    Mark,
    MembersSeen,
    Offer,
    Order,
    PoolFacts,
    PoolFreed,
    PoolMade,
    PoolRefused,
    StopCopies,
    Tick,
)
from nodes.protocol.memory import HasLetGo, HasTakenUp, LetGo, ListMemory, ReleaseMemory, ResumeMemory, TakeUp

S, W = Address("scheduler-g", 1), Address("worker-g", 1)
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8)
OPERATOR = Address("operator", 1)
RELEASED = "released"


def handle_of(group: str) -> PoolHandle:
    return PoolHandle(group=group, agent="agent", path="/g", num_pages=8, layout=LAYOUT, incarnation=1)


def let_go(group: str, number: int, holder: Address, desired: DesiredState) -> Ask:
    message = LetGo(group=group, number=number, weights=desired.weights)
    return Ask(holder.actor_id, message, ASK_TIMEOUT_S, Order(group, number, holder))


def take_up(group: str, number: int, holder: Address) -> Ask:
    message = TakeUp(group=group, number=number, pool=handle_of(group))
    return Ask(holder.actor_id, message, ASK_TIMEOUT_S, Order(group, number, holder))


def done(made: MemoryCore, group: str, number: int, holder: Address) -> Answered:
    kind = HasTakenUp if made._groups[group].desired is None else HasLetGo
    return Answered(Order(group, number, holder), kind(group=group, number=number), holder)


def not_done(group: str, number: int, holder: Address, why: str) -> AskFailed:
    return AskFailed(Order(group, number, holder), "peer_lost", why)


def seen(*states: tuple[Address, str], saver: bool = False, has_loaded: bool = True) -> MembersSeen:
    holders = [HolderSeen(one, one.actor_id.partition("-")[0], state, "g", saver, has_loaded) for one, state in states]
    return MembersSeen(holders, frozenset(one for one, _ in states))


def core(device: str = "cpu", **facts: Any) -> MemoryCore:
    made = MemoryCore([PoolFacts("g", device, 100, **facts)], handle_of, retry_s=1.0)
    made.handle(seen((S, "ready"), (W, "ready")), 0.0)
    return made


def release(made: MemoryCore, now: float = 0.0, **options: bool) -> list[Any]:
    return made.handle(Asked(OPERATOR, ReleaseMemory(groups=["g"], **options), 1), now)


def state(made: MemoryCore) -> str:
    (group,) = made.describe()
    return group.state


def released() -> MemoryCore:
    """An agent that finds its pool given back, and the worker without it."""
    made = core(desired=DesiredState(True, "keep"), is_there=False)
    made.handle(seen((W, RELEASED)), 0.0)
    assert state(made) == RELEASED
    return made


@pytest.fixture
def made() -> MemoryCore:
    return core()


def test_the_scheduler_goes_first_and_the_pool_last(made: MemoryCore) -> None:
    desired = DesiredState(True, "reload")
    *commands, answer = release(made)
    assert commands == [Mark("g", desired), StopCopies("g"), let_go("g", 1, S, desired)]
    assert (answer.message.groups[0].state, answer.message.groups[0].waiting_for) == (RELEASING, ["scheduler-g"])
    assert made.handle(done(made, "g", 1, S), 0.0) == [let_go("g", 1, W, desired)]
    assert made.handle(done(made, "g", 1, W), 0.0) == [], "a copy may still write"
    assert made.handle(CopiesEnded("g"), 0.0) == [FreePool("g")]
    assert made.handle(PoolFreed("g"), 0.0) == []
    (group,) = made.describe()
    assert (group.state, group.weights, group.pool_bytes) == (RELEASED, "reload", 0)
    assert len(release(made)) == 1, "asked again it only answers"


def test_a_pool_is_made_again_and_workers_that_let_go_take_up() -> None:
    made = released()
    assert made.handle(Asked(OPERATOR, ResumeMemory(), 1), 0.0)[0] == MakePool("g")
    assert state(made) == RESUMING
    assert made.handle(PoolMade("g"), 0.0) == [take_up("g", 1, W)]
    assert state(made) == RESUMING
    assert made.handle(done(made, "g", 1, W), 0.0) == []
    made.handle(seen((W, "ready")), 0.0)
    assert state(made) == HELD


def test_memory_that_is_not_there_leaves_it_released_and_says_why() -> None:
    made = released()
    made.handle(Asked(OPERATOR, ResumeMemory(), 1), 0.0)
    assert made.handle(PoolRefused("g", "the trainer has it"), 0.0) == []
    (group,) = made.describe()
    assert (group.state, group.reason) == (RELEASED, "the trainer has it")
    made.handle(Asked(OPERATOR, ResumeMemory(), 2), 0.0)
    assert made.describe()[0].reason == "the trainer has it", "until a try succeeds"
    made.handle(PoolMade("g"), 0.0)
    assert made.describe()[0].reason == ""


def test_kv_that_is_kept_is_offered_again(made: MemoryCore) -> None:
    release(made, keep_kv=True)
    made.handle(CopiesEnded("g"), 0.0)
    made.handle(done(made, "g", 1, S), 0.0)
    made.handle(done(made, "g", 1, W), 0.0)
    (group,) = made.describe()
    assert (group.state, group.pool_bytes) == (RELEASED, 100)
    made.handle(seen((W, RELEASED)), 0.0)
    commands = made.handle(Asked(OPERATOR, ResumeMemory(), 1), 0.0)
    assert commands[:3] == [Mark("g", None), Offer("g"), take_up("g", 2, W)]


@pytest.mark.parametrize("is_done", [True, False])
def test_who_was_asked_to_let_go_is_waited_for_before_its_state_is_heard_of(made: MemoryCore, is_done: bool) -> None:
    release(made, keep_kv=True)
    made.handle(CopiesEnded("g"), 0.0)
    made.handle(done(made, "g", 1, S), 0.0)
    if is_done:
        made.handle(done(made, "g", 1, W), 0.0)
        assert state(made) == RELEASED
    commands = made.handle(Asked(OPERATOR, ResumeMemory(), 1), 0.0)
    assert commands[:3] == [Mark("g", None), Offer("g"), take_up("g", 2, W)]
    assert state(made) == RESUMING
    made.handle(done(made, "g", 2, W), 0.0)
    assert state(made) == HELD


def test_who_does_not_answer_is_asked_again_and_named(made: MemoryCore) -> None:
    release(made)
    assert made.handle(not_done("g", 1, S, "no answer"), 3.0) == []
    assert made.next_deadline == 4.0
    assert made.describe()[0].reason == "scheduler-g#1: peer_lost: no answer"
    assert made.handle(Tick(), 3.9) == []
    assert made.handle(Tick(), 4.0) == [let_go("g", 1, S, DesiredState(True, "reload"))]
    assert made.next_deadline is None


def test_all_who_do_not_answer_are_asked_again_at_once(made: MemoryCore) -> None:
    other = Address("worker-g.1", 1)
    made.handle(seen((S, "ready"), (W, "ready"), (other, "ready")), 0.0)
    release(made)
    assert {one.tag.holder for one in made.handle(done(made, "g", 1, S), 1.0)} == {W, other}
    assert made.handle(not_done("g", 1, W, "no answer"), 3.0) == []
    assert made.handle(not_done("g", 1, other, "no answer"), 3.5) == []
    assert made.next_deadline == 4.0
    assert {one.tag.holder for one in made.handle(Tick(), 4.0)} == {W, other}


def test_the_dead_hold_nothing_and_who_comes_late_is_asked(made: MemoryCore) -> None:
    made.handle(CopiesEnded("g"), 0.0)
    release(made)
    made.handle(CopiesEnded("g"), 0.0)
    assert made.handle(HolderLost(S), 0.0) == [let_go("g", 1, W, DesiredState(True, "reload"))]
    assert made.handle(HolderLost(W), 0.0) == [FreePool("g")]
    made.handle(PoolFreed("g"), 0.0)
    zombie = Address("worker-g", 2)
    commands = made.handle(seen((zombie, "ready")), 0.0)
    assert commands == [let_go("g", 1, zombie, DesiredState(True, "reload"))], "it slept through the release"
    assert made.handle(done(made, "g", 7, zombie), 0.0) == [], "another order's"


def test_whoever_mapped_is_a_holder_before_it_is_a_member(made: MemoryCore) -> None:
    starting = Address("worker-g", 5)
    made.handle(seen(), 0.0)
    made.handle(Mapped("g", starting), 0.0)
    commands = release(made)
    assert let_go("g", 1, starting, DesiredState(True, "reload")) in commands
    made.handle(CopiesEnded("g"), 0.0)
    assert made.handle(seen((Address("worker-g", 6), RELEASED)), 0.0) == [FreePool("g")]


@pytest.mark.parametrize(
    ("device", "saver", "options", "weights"),
    [
        ("cpu", False, {}, "reload"),
        ("cuda:0", True, {}, "backup"),
        ("cuda:0", True, {"reload_weights": True}, "reload"),
        ("cuda:0", False, {"reload_weights": True}, "reload"),
        ("cuda:0", False, {"keep_weights": True}, "keep"),
        ("cuda:0", False, {}, ""),
    ],
)
def test_how_weights_go(device: str, saver: bool, options: dict[str, bool], weights: str) -> None:
    made = core(device)
    made.handle(seen((W, "ready"), saver=saver), 0.0)
    first, *_ = release(made, **options)
    if weights:
        assert first == Mark("g", DesiredState(True, weights))
    else:
        assert first.code == "memory_saver_off"
        assert state(made) == HELD


def test_a_backup_is_gone_with_its_process() -> None:
    made = core("cuda:0")
    made.handle(seen((W, "ready"), saver=True), 0.0)
    release(made)
    assert made.describe()[0].weights == "backup"
    made.handle(seen((Address("worker-g", 2), RELEASED)), 0.0)
    assert made.describe()[0].weights == "reload"


def test_weights_that_were_kept_are_gone_with_their_process() -> None:
    made = core()
    release(made, keep_weights=True)
    assert made.describe()[0].weights == "keep"
    made.handle(seen((W, RELEASED)), 0.0)
    assert made.describe()[0].weights == "keep"
    made.handle(seen(), 0.0)
    assert made.describe()[0].weights == "reload", "it is dead, and nobody has followed"
    made.handle(seen((Address("worker-g", 2), RELEASED), has_loaded=False), 0.0)
    assert made.describe()[0].weights == "reload", "the next one waits for the pool before it loads"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (ReleaseMemory(groups=["h"]), "unknown_group"),
        (ResumeMemory(groups=["g", "h"]), "unknown_group"),
        (ReleaseMemory(keep_kv=True, keep_weights=True), "nothing_to_release"),
        (ReleaseMemory(keep_kv=True), "already_released"),
        (ReleaseMemory(keep_weights=True), "already_released"),
    ],
)
def test_wishes_that_cannot_be(made: MemoryCore, message: Any, code: str) -> None:
    if code == "already_released":
        release(made)
    (refused,) = made.handle(Asked(OPERATOR, message, 9), 0.0)
    assert isinstance(refused, Refuse)
    assert (refused.call, refused.code) == (9, code)


def test_weights_are_not_called_kept_that_end_with_their_rank() -> None:
    made = core("cuda:0", tp_size=2)
    made.handle(seen((W, "ready")), 0.0)
    (refused,) = release(made, keep_weights=True)
    assert (refused.code, state(made)) == ("keep_weights", HELD)
    first, *_ = release(made, keep_kv=True, reload_weights=True)
    assert first == Mark("g", DesiredState(is_kv=False, weights="reload"))
    assert state(made) == RELEASING, "as the refusal said"


def test_an_agent_that_finds_a_wish_goes_on_with_it() -> None:
    made = core(desired=DesiredState(True, "reload"))
    assert state(made) == RELEASING
    commands = made.handle(seen((S, "ready"), (W, "starting")), 0.0)
    assert commands == [], "they were asked when they were seen first"
    assert made.describe()[0].waiting_for == ["scheduler-g"]
    made = MemoryCore([PoolFacts("g", "cpu", 100, DesiredState(True, "reload"))], handle_of)
    (answer,) = made.handle(Asked(OPERATOR, ListMemory(), 1), 0.0)
    assert answer.message.groups[0].state == RELEASING, "it has not joined yet, so others may have the pool mapped"
    assert made.handle(seen(), 0.0) == [FreePool("g")], "nobody is there"


def test_an_agent_that_has_not_joined_yet_does_not_say_that_all_have_let_go() -> None:
    made = MemoryCore([PoolFacts("g", "cpu", 100, DesiredState(False, "reload"))], handle_of)
    assert state(made) == RELEASING
    made.handle(seen((W, "ready")), 0.0)
    assert state(made) == RELEASING
    made.handle(done(made, "g", made._groups["g"].number, W), 0.0)
    assert state(made) == RELEASED


NO_ORDER = (0, 0)


class Holder:
    """A process that may map the pool. `order`: agent's incarnation and number of the last order heard.

    `is_unknown`: it mapped the pool of an agent that died before anybody heard of it. A file lives as long as it is
    mapped, and pages on a device died with that agent, so nothing is freed under it.
    """

    def __init__(self, address: Address) -> None:
        self.address, self.maps, self.state, self.order = address, False, "starting", NO_ORDER
        self.is_unknown = False


class Groups(RuleBasedStateMachine):
    """One group, its durable desired state, and holders that do what they are asked, late or never."""

    @initialize()
    def start(self) -> None:
        self.now = 0.0
        self.desired: DesiredState | None = None
        self.is_there = True
        self.is_offered = True
        self.is_copying = False
        self.holders: dict[str, Holder] = {}
        self.asks: list[Any] = []
        self.is_making = False
        self.epochs = self.agents = 0
        self.asked_for = HELD
        for actor_id in (S.actor_id, W.actor_id):
            self._spawn(actor_id)
        self._agent()

    def _agent(self) -> None:
        self.asks.clear()
        # Another incarnation counts its orders anew, and holders tell by both which order is the later one.
        self.agents += 1
        self.is_making = False
        self.is_offered = self.desired is None
        self.core = MemoryCore([PoolFacts("g", "cpu", 100, self.desired, self.is_there)], handle_of, retry_s=1.0)
        self._members()

    def _spawn(self, actor_id: str) -> None:
        self.epochs += 1
        self.holders[actor_id] = Holder(Address(actor_id, self.epochs))

    def _feed(self, event: Any) -> None:
        for command in self.core.handle(event, self.now):
            match command:
                case Mark(_, desired):
                    self.desired = desired
                case StopCopies():
                    self.is_offered = False
                    if not self.is_copying:
                        self._feed(CopiesEnded("g"))
                case Offer():
                    self.is_offered = True
                case Ask():
                    self.asks.append(command)
                case FreePool():
                    known = [one.address for one in self.holders.values() if one.maps and not one.is_unknown]
                    assert not known, "somebody maps it"
                    assert not self.is_copying
                    assert self.is_there
                    self.is_there = False
                    self._feed(PoolFreed("g"))
                case MakePool():
                    self.is_making = True
                case _:
                    assert isinstance(command, Reply), command

    def _members(self) -> None:
        holders = [
            HolderSeen(one.address, name.partition("-")[0], one.state, "g" if one.state != "starting" else "")
            for name, one in self.holders.items()
        ]
        self._feed(MembersSeen(holders, frozenset(one.address for one in self.holders.values())))

    @rule()
    def release(self) -> None:
        self.asked_for = RELEASED
        self._feed(Asked(OPERATOR, ReleaseMemory(), 1))

    @rule()
    def resume(self) -> None:
        self.asked_for = HELD
        self._feed(Asked(OPERATOR, ResumeMemory(), 1))

    @rule(which=st.sampled_from([S.actor_id, W.actor_id]), is_loaded=st.booleans())
    def comes_up(self, which: str, is_loaded: bool) -> None:
        """A process that waits for the pool gets it, or hears that it is released; then it loads, and says so."""
        holder = self.holders[which]
        if holder.state == RELEASED and holder.order > NO_ORDER:
            return
        if not holder.maps and self.is_offered and self.is_there:
            self._feed(Mapped("g", holder.address))
            holder.maps, holder.state = True, "starting"
        elif not holder.maps:
            holder.state = RELEASED
        if holder.maps and is_loaded:
            holder.state = "ready"
        self._members()

    @rule(which=st.sampled_from([S.actor_id, W.actor_id]), is_seen=st.booleans())
    def dies(self, which: str, is_seen: bool) -> None:
        dead = self.holders[which].address
        self._spawn(which)
        if is_seen:
            self._feed(HolderLost(dead))
        self._members()

    @rule(data=st.data())
    @precondition(lambda self: self.asks)
    def answers(self, data: st.DataObject) -> None:
        ask = self.asks.pop(data.draw(st.integers(0, len(self.asks) - 1)))
        is_heard, is_told, is_seen = (data.draw(st.sampled_from([True, True, False])) for _ in range(3))
        self._answer(ask, is_heard=is_heard, is_told=is_told, is_seen=is_seen)

    def _answer(self, ask: Any, *, is_heard: bool, is_told: bool, is_seen: bool = True) -> None:
        holder = self.holders[ask.tag.holder.actor_id]
        is_done = is_heard and holder.address == ask.tag.holder and (self.agents, ask.tag.number) >= holder.order
        if is_done and holder.maps and holder.state == "starting":
            # It cannot stop what it is doing, so it ends.
            self.dies(holder.address.actor_id, is_seen=True)
            is_done = False
        elif is_done:
            self._carry_out(holder, ask)
        if is_seen:
            self._members()
        ended = done(self.core, "g", ask.tag.number, ask.tag.holder)
        self._feed(ended if is_done and is_told else not_done("g", ask.tag.number, ask.tag.holder, "lost"))

    def _carry_out(self, holder: Holder, ask: Any) -> None:
        holder.order = (self.agents, ask.tag.number)
        if isinstance(ask.message, LetGo):
            holder.maps, holder.state = False, RELEASED
            if holder.address.actor_id == S.actor_id:
                self._spawn(S.actor_id)
        elif not holder.maps:
            assert self.is_there, "it is told of a pool that there is not"
            holder.maps, holder.state = True, "ready"

    @rule(is_copying=st.booleans())
    def copies(self, is_copying: bool) -> None:
        if is_copying and self.is_offered and self.is_there:
            self.is_copying = True
        elif not is_copying and self.is_copying:
            self.is_copying = False
            if not self.is_offered:
                self._feed(CopiesEnded("g"))

    @rule(fits=st.booleans())
    @precondition(lambda self: self.is_making)
    def makes(self, fits: bool) -> None:
        self.is_making = False
        if fits:
            self.is_there, self.desired, self.is_offered = True, None, True
            for one in [one for one in self.holders.values() if one.maps]:
                # It sees that the pool was made again.
                self.dies(one.address.actor_id, is_seen=True)
        self._feed(PoolMade("g") if fits else PoolRefused("g", "full"))

    @rule(seconds=st.floats(0.1, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self._feed(Tick())

    @rule()
    def the_agent_dies(self) -> None:
        self.is_copying = False
        for one in self.holders.values():
            one.is_unknown |= one.maps and one.state == "starting"
        self._agent()

    @invariant()
    def what_is_said_is_so(self) -> None:
        (group,) = self.core.describe()
        if group.state == RELEASED:
            assert self.desired is not None
            assert not (self.desired.is_kv and self.is_there)
        worker = self.holders[W.actor_id]
        if group.state == HELD and worker.state == RELEASED:
            assert worker.order[0] < self.agents, "of this agent it has heard that it should let go"

    def teardown(self) -> None:
        """With nobody dying any more, what was asked for last comes about."""
        if not hasattr(self, "core"):
            return
        for _ in range(40):
            if self.is_copying:
                self.copies(is_copying=False)
            if self.is_making:
                self.makes(fits=True)
            for ask in list(self.asks):
                if ask in self.asks:
                    self.asks.remove(ask)
                    self._answer(ask, is_heard=True, is_told=True)
            for actor_id in self.holders:
                self.comes_up(actor_id, is_loaded=True)
            self._feed(Asked(OPERATOR, ReleaseMemory() if self.asked_for == RELEASED else ResumeMemory(), 1))
            self.time_passes(2.0)
        (group,) = self.core.describe()
        assert group.state == self.asked_for, group
        is_held = self.asked_for == HELD
        assert all(one.maps is is_held for one in self.holders.values()), "so do all that come up"


TestGroups = Groups.TestCase
TestGroups.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)

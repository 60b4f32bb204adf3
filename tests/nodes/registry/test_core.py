import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mesh.address import MAX_EPOCH, MAX_HEARD_EPOCH, Address, Endpoint, host_of
from mesh.errors import FrameRefused
from mesh.membership.view import DRAINING, READY, STARTING, Member, Membership
from mesh.wire.frames import Join
from nodes.registry.core import FOREVER, RegistryCore, Stale

LEASE = 5.0


def member(actor_id, epoch=1, state=READY):
    return Member(actor_id=actor_id, role="worker", epoch=epoch, endpoint=Endpoint("c", "d"), state=state)


def join(core, who, now=0.0, view=None, known_members=()):
    known = (view.registry_epoch, view.version) if view is not None else (0, 0)
    return core.join(
        Join(member=who, known_epoch=known[0], known_version=known[1], known_members=list(known_members)), now
    )


def names(members):
    return [str(m.address) for m in members]


@pytest.fixture
def core():
    return RegistryCore(1, LEASE, 0.0)


def test_who_joins_first_gets_a_snapshot_and_the_others_a_change():
    core = RegistryCore(3, LEASE, 0.0)
    first = join(core, member("a"))
    assert sorted(names(first.joined.members)) == ["a#1"]
    second = join(core, member("b"))
    assert sorted(names(second.joined.members)) == ["a#1", "b#1"]
    assert names(second.change.upserted) == ["b#1"]
    assert second.change.version == second.joined.version == core.version == 3
    assert second.joined.registry_epoch == 3


def test_two_that_are_one_incarnation_at_different_places_are_told_apart(core):
    first = member("supervisor.d", epoch=7)
    second = msgspec.structs.replace(first, endpoint=Endpoint("elsewhere", "d"))
    join(core, first)
    with pytest.raises(Stale, match=r"another process is already a member as supervisor\.d#7, at c") as caught:
        join(core, second)
    assert caught.value.known_epoch == 7
    assert core.find("supervisor.d") == first
    core.leave(first.address, "killed")
    assert sorted(names(join(core, second).joined.members)) == ["supervisor.d#7"]


def test_an_update_by_whoever_is_current_needs_no_snapshot(core):
    view = Membership()
    view.reset(1, join(core, member("a")).joined.version, [])
    same = join(core, member("a"), view=view)
    assert same.joined.members is None
    assert same.change is None
    update = join(core, member("a", state=DRAINING), view=view)
    assert update.joined.members is None
    assert update.change.upserted[0].state == DRAINING


def test_who_knows_what_was_told_last_needs_no_snapshot_for_what_has_gathered_since(core):
    told = join(core, member("a", state=STARTING)).joined.version
    for name in "bcd":
        join(core, member(name))
    again = Join(member=member("a"), known_epoch=1, known_version=told, known_members=[])
    outcome = core.join(again, 0.0, told)
    assert (outcome.joined.members, outcome.joined.version) == (None, core.version)
    assert names(outcome.change.upserted) == ["a#1"]
    behind = core.join(msgspec.structs.replace(again, known_version=told - 1), 0.0, told)
    assert sorted(names(behind.joined.members)) == ["a#1", "b#1", "c#1", "d#1"]
    other_registry = core.join(msgspec.structs.replace(again, known_epoch=2), 0.0, told)
    assert other_registry.joined.members


def test_who_returns_brings_along_those_of_its_host_whose_leases_ran_out_with_its_own():
    core = RegistryCore(1, LEASE, -LEASE)
    host = [member(f"{name}.d") for name in "abcd"]
    for one in host:
        join(core, one)
    join(core, member("x.head"))
    core.leave(Address("c.d", 1), "killed")
    core.renew(Address("x.head", 1), LEASE)
    left = core.expire(LEASE)
    assert [departed.actor_id for departed in left.left] == ["a.d", "b.d", "d.d"]
    # Of c the supervisor has said that it is dead, of d a later incarnation is brought along; x speaks for its own.
    brought = [host[1], host[2], member("d.d", epoch=2)]
    assert names(join(core, member("x.head"), LEASE, known_members=host).joined.members) == ["x.head#1"]
    outcome = join(core, host[0], LEASE, known_members=brought)
    assert sorted(names(outcome.joined.members)) == ["a.d#1", "b.d#1", "x.head#1"]
    assert names(core.audience()) == ["a.d#1", "x.head#1"]
    # Who does not come itself is gone after a lease.
    for address in (Address("a.d", 1), Address("x.head", 1)):
        core.renew(address, LEASE + 1)
    assert [departed.actor_id for departed in core.expire(2 * LEASE).left] == ["b.d"]
    assert not core.expire(2 * LEASE)


def test_leases_end_unless_renewed(core):
    join(core, member("a"))
    join(core, member("b"))
    assert core.next_expiry() == LEASE
    assert core.renew(Address("a", 1), 4.0)
    assert not core.renew(Address("a", 2), 4.0)
    assert not core.renew(Address("x", 1), 4.0)
    assert core.expire(4.9) is None
    assert [d.address for d in core.expire(5.0).left] == [Address("b", 1)]
    assert core.knows(Address("a", 1))
    assert not core.knows(Address("b", 1))
    assert core.leave(Address("b", 1), "again") is None
    assert core.leave(Address("a", 1), "bye").left[0].reason == "bye"
    assert core.next_expiry() == FOREVER


def test_a_new_incarnation_replaces_and_an_old_one_is_stale(core):
    join(core, member("a"))
    change = join(core, member("a", 2)).change
    assert [d.address for d in change.left] == [Address("a", 1)]
    assert names(change.upserted) == ["a#2"]
    with pytest.raises(Stale, match="epoch 2"):
        join(core, member("a", 1))
    assert core.leave(Address("a", 1), "late") is None


def test_epochs_of_who_has_left_do_not_come_again(core):
    """Its host has lost its files, and its clock is behind."""
    join(core, member("a", epoch=1_700_000_000))
    assert core.expire(LEASE) is not None
    with pytest.raises(Stale) as caught:
        join(core, member("a", epoch=1_699_913_600), LEASE)
    assert caught.value.known_epoch == 1_700_000_000
    join(core, member("a", epoch=1_700_000_000), LEASE)
    assert core.knows(Address("a", 1_700_000_000)), "it was only silent for long"
    for number in range(5000):
        join(core, member(f"client-{number}"), LEASE)
    core.expire(3 * LEASE)
    assert len(core.departed) == 4096


def test_a_restarted_registry_believes_what_members_bring_along_for_one_lease():
    core = RegistryCore(2, LEASE, 100.0)
    outcome = join(core, member("a"), 101.0, known_members=[member("a"), member("b", 4), member("c")])
    assert sorted(names(outcome.joined.members)) == ["a#1", "b#4", "c#1"]
    assert names(outcome.change.upserted) == ["b#4", "c#1", "a#1"]
    late = join(core, member("c"), 105.5, known_members=[member("d"), member("b", 4)])
    assert sorted(names(late.joined.members)) == ["a#1", "b#4", "c#1"]
    assert [d.actor_id for d in core.expire(106.1).left] == ["a", "b"]


@pytest.mark.parametrize(("now", "above"), [(0.0, 900), (LEASE, 70)])
def test_who_follows_goes_above_those_that_a_new_registry_has_yet_to_hear_of(now, above):
    core = RegistryCore(900, LEASE, 0.0)
    join(core, member("a"), known_members=[member("b", 70)])
    with pytest.raises(Stale) as caught:
        join(core, member("b", 3), now)
    assert caught.value.known_epoch == above


def test_who_was_stopped_while_a_registry_began_is_believed_of_later_incarnations_than_are_members():
    """It would refuse those of a host that came back without its files and with its clock behind."""
    core = RegistryCore(2, LEASE, 0.0)
    join(core, member("worker.d", 3), 1.0)
    late = join(core, member("agent.p"), 2 * LEASE, known_members=[member("worker.d", 70), member("agent.d", 70)])
    assert names(late.joined.members) == ["worker.d#70", "agent.p#1"]
    with pytest.raises(Stale, match="epoch 70"):
        join(core, member("worker.d", 3), 2 * LEASE)
    assert names(join(core, member("worker.d", 71), 2 * LEASE).change.upserted) == ["worker.d#71"]


def test_changes_are_told_to_those_who_joined_themselves():
    core = RegistryCore(2, LEASE, 0.0)
    join(core, member("a"), known_members=[member("b", 4), member("c")])
    assert names(core.audience()) == ["a#1"]
    join(core, member("b", 4))
    assert names(core.audience()) == ["a#1", "b#4"]
    # Another incarnation has not joined because the one before had.
    join(core, member("a"), known_members=[member("b", 5)])
    assert names(core.audience()) == ["a#1"]
    join(core, member("b", 5))
    assert names(core.audience()) == ["a#1", "b#5"]


def test_known_members_of_an_older_incarnation_is_nothing_new():
    core = RegistryCore(2, LEASE, 0.0)
    join(core, member("b", 4))
    outcome = join(core, member("a"), known_members=[member("b", 3), member("b", 4)])
    assert names(outcome.change.upserted) == ["a#1"]


def test_no_earlier_incarnation_of_a_member_that_left_is_believed():
    core = RegistryCore(2, LEASE, 0.0)
    join(core, member("b", 4))
    core.leave(Address("b", 4), "stopped")
    assert names(join(core, member("a"), known_members=[member("b", 3)]).joined.members) == ["a#1"]


def doubting(host):
    """A check that takes nobody of a host by another's word, as its supervisor's secret is new."""

    def check(who, known):
        if host_of(who.actor_id) == host and not who.proof:
            raise FrameRefused("no_proof")

    return check


def proved(actor_id, epoch):
    return msgspec.structs.replace(member(actor_id, epoch), proof=b"p")


def test_who_was_shown_no_proofs_and_names_members_without_is_not_suspected():
    """Other hosts, and who was started by hand, name all members to a registry that has started again."""

    def check(who, _known):
        if who.role == "worker":
            raise FrameRefused("bad_proof" if who.proof else "no_proof")

    core = RegistryCore(9, LEASE, 0.0, check)
    named = [member("worker-0.head", 3), proved("worker-1.head", 4)]
    for by in ("words", "x.d"):
        outcome = join(core, msgspec.structs.replace(member(by), role="custom"), known_members=named)
        assert [(address, why.code) for address, why in outcome.doubted] == [(named[1].address, "bad_proof")]


@pytest.mark.parametrize("is_there_first", [False, True])
def test_actors_of_the_registrys_host_go_above_what_other_hosts_knew_of_them(is_there_first):
    """The host has lost its files, its clock is behind, and the others name its actors without proofs."""
    core = RegistryCore(9, LEASE, 0.0, doubting("head"))
    old = proved("worker-0.head", 3)
    if is_there_first:
        join(core, old)
    outcome = join(core, member("x.d"), known_members=[member("worker-0.head", 70), member("y.d", 2)])
    assert sorted(names(outcome.joined.members)) == ["x.d#1", "y.d#2"], "by a word that is doubted nobody is a member"
    left = outcome.change.left
    assert [d.address for d in left] == [Address("worker-0.head", 3)] * is_there_first
    assert not core.renew(old.address, 0.0)
    with pytest.raises(Stale) as caught:
        join(core, old)
    assert caught.value.known_epoch == 70
    assert names(join(core, proved("worker-0.head", 71)).change.upserted) == ["worker-0.head#71"]
    # By who is of that host, or of none, nobody is ended; nor by what is said later.
    for by, now in (("stranger.head", 0.0), ("stranger", 0.0), ("x.d", LEASE)):
        assert not join(core, proved(by, 2), now, known_members=[member("worker-0.head", 99)]).change.left[1:]
        assert core.knows(Address("worker-0.head", 71))


def test_a_host_that_may_not_vouch_is_believed_of_its_own_actors_alone():
    """By later incarnations that it makes up it would end others', in the lease after the registry has started."""
    core = RegistryCore(9, LEASE, 0.0, doubting("head"), lambda by: host_of(by) != "evil")
    named = [member(f"supervisor.{host}", 70) for host in ("head", "d", "evil")]
    outcome = join(core, member("worker-x.evil"), known_members=named)
    assert sorted(names(outcome.change.upserted)) == ["supervisor.evil#70", "worker-x.evil#1"]
    for host in ("head", "d"):
        assert names(join(core, proved(f"supervisor.{host}", 3)).change.upserted) == [f"supervisor.{host}#3"]
    assert names(join(core, member("worker-0.d"), known_members=[member("worker-0.p", 5)]).change.upserted)[1:] == [
        "worker-0.d#1"
    ]


def test_nobody_is_said_to_have_an_epoch_that_the_next_cannot_go_above():
    core = RegistryCore(9, LEASE, 0.0, doubting("head"))
    named = [member(name, MAX_HEARD_EPOCH + 1) for name in ("worker-0.head", "worker-0.e")]
    assert names(join(core, member("x.d"), known_members=named).joined.members) == ["x.d#1"]
    join(core, member("x.d"), known_members=[member("worker-0.e", MAX_HEARD_EPOCH)])
    with pytest.raises(Stale) as caught:
        join(core, member("worker-0.e", 5))
    assert caught.value.known_epoch + 1 < MAX_EPOCH
    join(core, member("worker-0.e", caught.value.known_epoch + 1))
    with pytest.raises(FrameRefused, match="too high"):
        join(core, member("worker-0.e", MAX_EPOCH))


def test_after_an_absence_of_its_own_every_lease_starts_again(core):
    core.admit(member("registry"))
    join(core, member("a"))
    core.forgive(60.0)
    assert core.expire(64.0) is None
    assert [d.actor_id for d in core.expire(65.0).left] == ["a"]
    assert names(core.members()) == ["registry#1"]


IDS = st.sampled_from("abcd")


class Leases(RuleBasedStateMachine):
    """A member is one exactly while its lease lasts; whoever applies all changes knows the same members."""

    def __init__(self):
        super().__init__()
        self.core = RegistryCore(1, LEASE, 0.0)
        self.view = Membership()
        self.view.reset(1, self.core.version, [])
        self.now = 0.0
        self.leases = {}
        self.last = {}

    def told(self, change):
        if change is not None:
            left = [departed.address for departed in change.left]
            assert self.view.apply(1, change.version, change.upserted, left) is not None

    @rule(actor_id=IDS, epoch=st.integers(1, 4), state=st.sampled_from([READY, DRAINING]), fresh=st.booleans(),
          known_members=st.lists(st.builds(member, IDS, st.integers(1, 4)), max_size=2))  # fmt: skip
    def join(self, actor_id, epoch, state, fresh, known_members):
        if self.last.get(actor_id, 0) > epoch:
            with pytest.raises(Stale):
                join(self.core, member(actor_id, epoch, state), self.now)
            return
        view = None if fresh else self.view
        known_members = [m for m in known_members if m.actor_id != actor_id]
        outcome = join(self.core, member(actor_id, epoch, state), self.now, view, known_members)
        self.told(outcome.change)
        for m in known_members:
            # Who is no member is one by another's word while the registry is new, a later incarnation at any time.
            is_later = m.actor_id in self.leases and self.leases[m.actor_id][0] < m.epoch
            is_new = m.actor_id not in self.leases and self.now < LEASE and self.last.get(m.actor_id, 0) <= m.epoch
            if is_later or is_new:
                self.leases[m.actor_id] = (m.epoch, self.now + LEASE)
                self.last[m.actor_id] = m.epoch
        self.leases[actor_id] = (epoch, self.now + LEASE)
        self.last[actor_id] = epoch
        assert (outcome.joined.members is None) == (view is not None)

    @rule(actor_id=IDS, epoch=st.integers(1, 4))
    def renew(self, actor_id, epoch):
        known = self.leases.get(actor_id, (0, 0))[0] == epoch
        assert self.core.renew(Address(actor_id, epoch), self.now) == known
        if known:
            self.leases[actor_id] = (epoch, self.now + LEASE)

    @rule(actor_id=IDS, epoch=st.integers(1, 4))
    def leave(self, actor_id, epoch):
        known = self.leases.get(actor_id, (0, 0))[0] == epoch
        change = self.core.leave(Address(actor_id, epoch), "")
        assert (change is not None) == known
        self.told(change)
        if known:
            del self.leases[actor_id]

    @rule(by=st.floats(0, 4))
    def pass_time(self, by):
        self.now += by
        self.told(self.core.expire(self.now))
        self.leases = {k: v for k, v in self.leases.items() if v[1] > self.now}

    @invariant()
    def agrees(self):
        assert {m.actor_id: m.epoch for m in self.core.members()} == {k: e for k, (e, _) in self.leases.items()}
        assert self.view.all() == self.core.members()
        assert self.view.version == self.core.version
        assert self.core.next_expiry() == min((t for _, t in self.leases.values()), default=FOREVER)


TestLeases = Leases.TestCase
TestLeases.settings = settings(deadline=None, max_examples=80, stateful_step_count=40)

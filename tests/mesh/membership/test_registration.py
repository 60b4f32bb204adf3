"""Joining while the registry speaks: what it says beside its answer is neither refused nor lost."""

import asyncio

import structlog

from mesh.actor import Answer
from mesh.address import Address, Endpoint
from mesh.errors import DeadlineExceeded, PeerLost, RemoteError, Unreachable
from mesh.membership.registration import Registration
from mesh.membership.view import LearningBootstrap, Member, Membership, StaticBootstrap
from mesh.options import SystemOptions
from mesh.runtime.task_supervisor import TaskSupervisor
from mesh.runtime.telemetry import Metrics
from mesh.simulation import virtual_time
from mesh.wire.frames import Heartbeat, Joined, MembersChanged

REGISTRY, SUCCESSOR = Address("registry", 1), Address("registry", 2)
NOWHERE = Endpoint("sim://registry", "sim://registry.data")


def member(actor_id: str) -> Member:
    return Member(actor_id=actor_id, role="recorder", epoch=1, endpoint=NOWHERE)


def changed(version: int, *actor_ids: str) -> MembersChanged:
    return MembersChanged(registry_epoch=1, version=version, upserted=[member(a) for a in actor_ids], left=[])


class Registry:
    """Answers joins from `answers`; before it lets go of one, tells what stands with it."""

    def __init__(self, answers):
        self.answers = answers
        self.joins = []

    async def ask(self, actor_id, message, *, timeout_s):
        self.joins.append(message)
        answer, told = self.answers.pop(0) if self.answers else (None, [])
        for change in told:
            assert self.registration.members_changed(REGISTRY, change)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            raise DeadlineExceeded("no answer")
        return Answer(answer, (), REGISTRY)


class Audience:
    """Whose membership it is, and who hears of changes."""

    def __init__(self):
        self.view = Membership()
        self.bootstrap = LearningBootstrap(StaticBootstrap(REGISTRY, NOWHERE))
        self.changes = []
        self.ends = []

    def describe(self):
        return member("me")

    def members_changed(self, change, leaving=()):
        self.changes.append([m.actor_id for m in change.joined])

    def is_over(self, by, why):
        self.ends.append((by, why.message, why.known_epoch))


def run(answers, after=lambda registration: None, registry_class=Registry):
    async def main():
        registry, audience = registry_class(answers), Audience()
        log = structlog.get_logger()
        tasks = TaskSupervisor(log, Metrics())
        registration = registry.registration = Registration(
            registry, audience, audience.members_changed, SystemOptions(), tasks
        )
        registration.start()
        await registration.joined()
        after(registration)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await tasks.close()
        return registration, registry, audience

    return asyncio.run(main())


def joined(version, *actor_ids):
    return Joined(registry_epoch=1, version=version, members=[member(a) for a in actor_ids])


def test_changes_that_overtake_the_end_of_the_join_are_applied_after_the_snapshot():
    registration, registry, audience = run([(joined(3, "me", "a"), [changed(3, "a"), changed(4, "b")])])
    assert audience.changes == [["a", "me"], ["b"]]
    assert registration.view.version == 4
    assert len(registry.joins) == 1


def test_a_gap_among_early_changes_joins_again():
    registration, registry, _ = run([(joined(3, "me"), [changed(5, "c")]), (joined(5, "me", "b", "c"), [])])
    assert len(registry.joins) == 2
    assert registration.view.version == 5


def test_too_many_early_changes_join_again_instead_of_piling_up():
    many = [changed(version, f"m{version}") for version in range(4, 104)]
    registration, registry, _ = run([(joined(3, "me"), [*many])], lambda r: r.members_changed(REGISTRY, changed(104)))
    assert registration.view.version == 67
    assert len(registry.joins) == 2


def test_a_snapshot_older_than_the_view_does_not_take_it_back():
    registration, _, audience = run(
        [(joined(3, "me"), []), (joined(3, "me"), [changed(4, "a")])], lambda r: r.announce()
    )
    assert registration.view.version == 4
    assert audience.changes == [["me"], ["a"]]


def test_a_join_that_comes_too_late_ends_the_actor():
    late = RemoteError("stale_epoch", "epoch 7 of me is known", known_epoch=7)
    _, _, audience = run([(late, []), (joined(3, "me"), [])])
    assert audience.ends == [(REGISTRY, "epoch 7 of me is known", 7)]


def test_a_stranger_is_still_refused():
    registration, _, _ = run([(joined(3, "me"), [])])
    assert not registration.members_changed(Address("x", 1), changed(4, "a"))


def test_why_a_join_fails_is_kept_until_one_succeeds():
    lost = PeerLost("registry#1 is lost: its key is unknown")
    lost.reason = "its key is unknown"
    again = Unreachable("registry#1 could not be reached; the next attempt is in 0.04 s")
    seen = []

    class Watched(Registry):
        async def ask(self, actor_id, message, *, timeout_s):
            seen.append(self.registration.trouble)
            return await super().ask(actor_id, message, timeout_s=timeout_s)

    registration, _, _ = run([(lost, []), (again, []), (joined(3, "me"), [])], registry_class=Watched)
    assert seen == ["", "its key is unknown", "its key is unknown"]
    assert registration.trouble == ""


def test_a_registry_that_dies_between_its_answer_and_the_taking_of_it_is_looked_for():
    class Dying(Registry):
        async def ask(self, actor_id, message, *, timeout_s):
            answer = await super().ask(actor_id, message, timeout_s=timeout_s)
            if len(self.joins) == 1:
                self.registration.peer_lost(REGISTRY)
            return answer

    registration, registry, audience = run([(joined(3, "me"), []), (joined(3, "me"), [])], registry_class=Dying)
    assert len(registry.joins) == 2
    assert registration.registry == REGISTRY
    assert audience.changes == [["me"]]


class Found(Registry):
    """The living one is found while the second join is on its way."""

    async def ask(self, actor_id, message, *, timeout_s):
        if len(self.joins) == 1:
            self.registration.found(SUCCESSOR)
        return await super().ask(actor_id, message, timeout_s=timeout_s)


def test_only_the_join_that_a_registry_is_found_during_is_made_again_at_once():
    def found_before(registration):
        registration.found(SUCCESSOR)
        registration.announce()

    _, registry, _ = run([(joined(3, "me"), [])], found_before)
    assert len(registry.joins) == 2, "that join asked the one that was found: its failure is followed by a pause"
    _, registry, _ = run([(joined(3, "me"), [])], lambda registration: registration.announce(), Found)
    assert len(registry.joins) == 3


def test_a_registry_that_knows_it_from_others_and_is_about_to_give_it_up_is_joined_at_once():
    """The pause after a lost join may be longer than what is left of the lease."""

    def begun(registration):
        asking = Heartbeat(renew=True)
        registration.peer_lost(REGISTRY)
        loop = asyncio.get_running_loop()
        for delay_s, peer, beat in ((0.01, REGISTRY, asking), (0.02, Address("x", 1), asking), (0.03, REGISTRY, None)):
            loop.call_later(delay_s, registration.heartbeat, peer, beat or Heartbeat())

    async def main(after):
        registry, audience = Registry([(joined(3, "me"), [])]), Audience()
        tasks = TaskSupervisor(structlog.get_logger(), Metrics())
        options = SystemOptions(retry_min_s=1.0)
        registration = registry.registration = Registration(
            registry, audience, audience.members_changed, options, tasks
        )
        registration.start()
        await registration.joined()
        after(registration)
        await asyncio.sleep(0.1)
        await tasks.close()
        return len(registry.joins)

    assert virtual_time.run(main(begun)) == 3, "a join, the lost one, and one for the first heartbeat"
    assert virtual_time.run(main(lambda registration: registration.peer_lost(REGISTRY))) == 2

"""The agent's decisions, by events and commands alone."""

from typing import Any

import pytest

from kvstore.layout import KVLayout
from kvstore.protocol import (
    CloseGrant,
    GrantClosed,
    GrantsOpened,
    MapPool,
    OpenGrant,
    PagesPulled,
    PagesReady,
    PoolHandle,
    TransferFailed,
)
from kvstore.transfer.session import CopyEnded, SessionLimits, StartCopy, TransferSession
from mesh.address import Address
from mesh.runtime.effects import Asked, Refuse, Reply, Tell, Told
from mesh.runtime.trace_ring import key_of
from nodes.kv_agent.core import AgentCore, Bounds, Pool
from nodes.kv_agent.events import (
    CancelPull,
    Command,
    CopyDone,
    Draining,
    GroupReleased,
    MapForeign,
    PeerGone,
    SourceId,
    SourceMapped,
    SourceRefused,
    StartPull,
    Tick,
    UnmapForeign,
)
from nodes.kv_agent.metrics import gauges
from nodes.trace_notes import Noted
from tests.nodes.kv_agent.one_by_one import grant_of, ready_of, together
from tests.nodes.noted import NoteList

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8)
OTHER = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8)
D, P = Address("D", 1), Address("P", 1)
OWN, FOREIGN = SourceId("agent", "p"), SourceId("far", "p")
LIMITS = SessionLimits(map_s=2, waiting_s=5, copy_s=3, resend_s=0.5, linger_s=10)


def make_core(max_grants: int = 8, max_remembered: int = 8) -> AgentCore:
    pools = [Pool("d", "/shm/d", 20, LAYOUT, 7), Pool("p", "/shm/p", 30, LAYOUT, 8)]
    return AgentCore("agent", pools, Bounds(max_grants, max_remembered, LIMITS))


def grant(grant_id: str = "g1", pages: tuple[int, ...] = (1, 2), **changes: Any) -> OpenGrant:
    fields = {"grant_id": grant_id, "generations": [100 + page for page in pages], **changes}
    return grant_of(pages, **{"layout_digest": LAYOUT.digest, **fields})


def opening(message: OpenGrant, call: int = 1) -> Asked:
    return Asked(Address(message.holder, message.holder_epoch), together(message), call)


def ready(grant_id: str = "g1", pages: tuple[int, ...] = (11, 12), **changes: Any) -> PagesReady:
    source = {"source_agent": "agent", "source_incarnation": 8, "generations": [200 + page for page in pages]}
    return ready_of(pages, LAYOUT.digest, **{"grant_id": grant_id, **source, **changes})


def pull(copy_id: int = 1, grant_id: str = "g1", source: SourceId = OWN, incarnation: int = 8) -> StartPull:
    return StartPull(
        grant_id, "d", source, incarnation, StartCopy(copy_id, [11, 12], [211, 212], [1, 2], [101, 102], 3.0)
    )


def sessions(core: AgentCore) -> dict[str, TransferSession]:
    return {one.grant.grant_id: one for one in core.sessions}


def codes(commands: list[Command]) -> list[str]:
    """Codes of refusals and told failures, in order."""
    found: list[str] = []
    for command in commands:
        match command:
            case Refuse(_, code):
                found.append(code)
            case Reply(_, GrantsOpened(refused=refused)):
                found += [one.code for one in refused]
            case Tell(_, TransferFailed(code=code)):
                found.append(code)
    return found


RELEASED = GroupReleased("p", "memory_released", "given back")

OPENED = Reply(1, GrantsOpened(opened=["g1"]))
CLOSED = GrantClosed(grant_id="g1")


@pytest.fixture
def core() -> AgentCore:
    return make_core()


@pytest.fixture
def copying(core: AgentCore) -> AgentCore:
    """A grant of pages 1 and 2, which are being copied from a pool of its own."""
    assert core.handle(opening(grant()), 0.0) == [OPENED]
    assert core.handle(Told(P, together(ready())), 0.0) == [pull()]
    return core


def test_what_is_read_from_a_released_pool_fails_and_nothing_else(core: AgentCore) -> None:
    core.handle(opening(grant()), 0.0)
    core.handle(opening(grant("g2", (3, 4)), 2), 0.0)
    assert core.handle(Told(P, together(ready())), 0.0) == [pull()]
    core.handle(Told(P, together(ready("g2", source_agent="far"))), 0.0)
    commands = core.handle(RELEASED, 1.0)
    assert CancelPull("g1", 1) in commands
    commands += core.handle(CopyDone("g1", CopyEnded(1, "cancelled", ""), 0), 1.0)
    told = [one.message for one in commands if isinstance(one, Tell) and isinstance(one.message, TransferFailed)]
    assert {(one.grant_id, one.code) for one in told} == {("g1", "memory_released")}
    core.handle(opening(grant("g3", (5, 6)), 3), 2.0)
    again = core.handle(Told(P, together(ready("g3"))), 2.0)
    assert set(codes(again)) == {"memory_released"}
    assert not any(isinstance(one, MapForeign | StartPull) for one in again)


def test_pools_are_described(core: AgentCore) -> None:
    [reply] = core.handle(Asked(Address("w", 1), MapPool(group="p"), 1), 0.0)
    assert reply == Reply(
        1, PoolHandle(group="p", agent="agent", path="/shm/p", num_pages=30, layout=LAYOUT, incarnation=8)
    )
    [refusal] = core.handle(Asked(Address("w", 1), MapPool(group="x"), 2), 0.0)
    assert isinstance(refusal, Refuse)
    assert (refusal.code, refusal.message) == ("unknown_group", "agent has no pool of group 'x' (it has: d, p)")


def replies(commands: list[Command]) -> list[Reply]:
    return [one for one in commands if isinstance(one, Reply)]


def test_a_pool_is_handed_over_once_no_copy_writes_it_any_more(copying: AgentCore) -> None:
    core, later = copying, Address("D", 2)
    assert core.handle(Asked(Address("w", 1), MapPool(group="d"), 2), 0.5) != [], "a worker takes no page over"
    commands = core.handle(Asked(later, MapPool(group="d"), 3), 1.0)
    assert CancelPull("g1", 1) in commands
    assert replies(commands) == replies(core.handle(Asked(later, MapPool(group="d"), 4), 1.1)) == []
    answers = replies(core.handle(CopyDone("g1", CopyEnded(1, "cancelled", ""), 0), 1.2))
    assert [(one.call, type(one.message)) for one in answers] == [(3, PoolHandle), (4, PoolHandle)]
    assert len(replies(core.handle(Asked(later, MapPool(group="d"), 5), 1.3))) == 1


def test_a_transfer_between_own_pools(copying: AgentCore) -> None:
    core = copying
    assert gauges(core)['mesh_kv_pages_in_transfer{state="copying"}'] == 2
    done = PagesPulled(grant_id="g1", num_pages=2, complete=True)
    assert core.handle(CopyDone("g1", CopyEnded(1), 4096), 1.0) == [Tell("D", done)]
    assert core.num_live == 0
    assert core.handle(Told(P, together(ready())), 1.1) == [Tell("D", done), Tell("P", done)]
    assert core.handle(Asked(D, CloseGrant(grant_id="g1"), 2), 1.2) == [Reply(2, CLOSED)], "closed by itself"
    found = gauges(core)
    assert (found["mesh_kv_transfer_bytes_total"], found["mesh_kv_transfer_pages_total"]) == (4096, 2)
    assert (found['mesh_kv_sessions{state="success"}'], found["mesh_kv_grants_open"]) == (1, 0)
    assert core.handle(opening(grant("g2")), 1.3) == [Reply(1, GrantsOpened(opened=["g2"]))], "its pages are free"


def test_a_foreign_pool_is_asked_for_once_and_kept(core: AgentCore) -> None:
    core.handle(opening(grant("g1", (1, 2))), 0.0)
    core.handle(opening(grant("g2", (3, 4))), 0.0)
    core.handle(opening(grant("g3", (5, 6))), 0.0)
    foreign = {"source_agent": "far", "source_incarnation": 4}
    assert core.handle(Told(P, together(ready("g1", **foreign))), 0.0) == [MapForeign(FOREIGN)]
    assert core.handle(Told(P, together(ready("g2", **foreign))), 0.0) == []
    commands = core.handle(SourceMapped(FOREIGN, 4, LAYOUT.digest), 0.1)
    assert [command.grant_id for command in commands if isinstance(command, StartPull)] == ["g1", "g2"]
    [third] = core.handle(Told(P, together(ready("g3", **foreign))), 0.2)
    assert (third.source, third.incarnation, gauges(core)["mesh_kv_foreign_pools"]) == (FOREIGN, 4, 1)
    core.handle(opening(grant("g4", (7, 8))), 0.0)
    assert core.handle(Told(P, together(ready("g4", source_agent="far", source_incarnation=5))), 0.3) == [
        MapForeign(FOREIGN)
    ]
    assert codes(core.handle(SourceMapped(FOREIGN, 4, LAYOUT.digest), 0.4)) == ["source_changed"] * 2


def test_a_foreign_pool_that_cannot_be_mapped(core: AgentCore) -> None:
    core.handle(opening(grant()), 0.0)
    core.handle(Told(P, together(ready(source_agent="far"))), 0.0)
    assert codes(core.handle(SourceRefused(FOREIGN, "peer_lost", "gone"), 0.1)) == ["peer_lost"] * 2
    assert core.handle(SourceRefused(FOREIGN, "peer_lost", "gone"), 0.1) == []
    assert gauges(core)['mesh_kv_transfer_failures_total{code="peer_lost"}'] == 1


def test_a_grant_forgotten_while_its_source_is_mapped() -> None:
    core = make_core(max_remembered=0)
    core.handle(opening(grant()), 0.0)
    core.handle(Told(P, together(ready(source_agent="far"))), 0.0)
    core.handle(Asked(D, CloseGrant(grant_id="g1"), 1), 0.0)
    assert core.handle(SourceMapped(FOREIGN, 8, LAYOUT.digest), 0.1) == []


def test_an_own_pool_of_another_incarnation_fails_once(core: AgentCore) -> None:
    core.handle(opening(grant()), 0.0)
    assert codes(core.handle(Told(P, together(ready(source_incarnation=3))), 0.0)) == ["source_changed"] * 2
    assert (core.num_live, core.failures["source_changed"]) == (0, 1)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"group": "x"}, "unknown_group"),
        ({"layout_digest": OTHER.digest}, "layout_mismatch"),
        ({"pages": []}, "bad_grant"),
        ({"pages": [0, 1]}, "bad_grant"),
        ({"pages": [1, 20]}, "bad_grant"),
        ({"pages": [1, 1]}, "bad_grant"),
        ({"generations": [1]}, "bad_grant"),
        ({"timeout_s": 0.0}, "bad_grant"),
    ],
)
def test_grants_that_cannot_be(core: AgentCore, changes: dict[str, Any], code: str) -> None:
    assert codes(core.handle(opening(grant(**changes)), 0.0)) == [code]
    assert core.num_live == 0


def test_only_the_holder_opens_and_closes(core: AgentCore) -> None:
    assert codes(core.handle(Asked(P, together(grant()), 1), 0.0)) == ["not_holder"]
    assert codes(core.handle(Asked(Address("D", 2), together(grant()), 1), 0.0)) == ["not_holder"]
    core.handle(opening(grant()), 0.0)
    assert codes(core.handle(Asked(P, CloseGrant(grant_id="g1"), 1), 0.0)) == ["not_holder"]
    assert core.handle(Asked(P, CloseGrant(grant_id="unknown"), 2), 0.0) == [Reply(2, GrantClosed(grant_id="unknown"))]


def test_opening_again_renews_and_a_used_grant_is_used(core: AgentCore) -> None:
    core.handle(opening(grant()), 0.0)
    assert core.next_deadline == 20.0
    assert core.handle(opening(grant()), 15.0) == [OPENED]
    assert codes(core.handle(Tick(), 20.0)) == []
    assert core.next_deadline == 35.0
    assert codes(core.handle(opening(grant(pages=(3, 4))), 15.0)) == ["grant_id_taken"]
    core.handle(Told(P, together(ready())), 16.0)
    core.handle(CopyDone("g1", CopyEnded(1), 1), 16.0)
    assert codes(core.handle(opening(grant()), 17.0)) == ["grant_used"]


def test_pages_are_in_one_grant_at_a_time(core: AgentCore) -> None:
    core.handle(opening(grant("g1", (1, 2))), 0.0)
    assert codes(core.handle(opening(grant("g2", (2, 3))), 0.0)) == ["page_granted"]
    core.handle(Told(P, together(ready())), 0.0)
    close = core.handle(Asked(D, CloseGrant(grant_id="g1"), 5), 0.5)
    assert close[0] == CancelPull("g1", 1)
    assert replies(close) == [], "a copy may still write"
    assert codes(core.handle(opening(grant("g2", (2, 3))), 0.6)) == ["page_granted"]
    assert core.handle(Asked(D, CloseGrant(grant_id="g1"), 6), 0.7) == []
    done = core.handle(CopyDone("g1", CopyEnded(1, "cancelled", ""), 10), 0.8)
    assert replies(done) == [Reply(5, CLOSED), Reply(6, CLOSED)]
    assert core.handle(opening(grant("g2", (2, 3))), 0.9) == [Reply(1, GrantsOpened(opened=["g2"]))]


def test_grants_are_bounded_and_ended_ones_are_forgotten() -> None:
    core = make_core(max_grants=2, max_remembered=3)
    core.handle(opening(grant("a", (1,))), 0.0)
    core.handle(opening(grant("b", (2,))), 0.0)
    [answer] = core.handle(opening(grant("c", (3,))), 0.0)
    [refusal] = answer.message.refused
    assert refusal.code == "too_many_grants"
    for number in range(10):
        core.handle(Asked(D, CloseGrant(grant_id="b"), 1), 0.0)
        core.handle(opening(grant(f"x{number}", (2,))), 0.0)
        core.handle(Asked(D, CloseGrant(grant_id=f"x{number}"), 1), 0.0)
    assert len(core.sessions) == 4
    assert codes(core.handle(Told(P, together(ready("x0", (11,)))), 0.0)) == ["unknown_grant"]
    assert codes(core.handle(Told(P, together(ready("x9", (11,)))), 0.0)) == ["grant_closed"]
    core.handle(Tick(), 10.0)
    assert list(sessions(core)) == ["a"]
    core.handle(Tick(), 20.0)
    core.handle(Tick(), 40.0)
    assert (len(core.sessions), core.next_deadline) == (0, None)
    assert codes(core.handle(opening(grant("z", (1, 2))), 41.0)) == [], "the pages are in no grant"


def test_a_lost_holder_loses_its_grants(copying: AgentCore) -> None:
    commands = copying.handle(PeerGone(D, "heartbeat"), 0.5)
    assert commands[0] == CancelPull("g1", 1)
    assert codes(commands) == ["holder_lost"]
    copying.handle(CopyDone("g1", CopyEnded(1, "cancelled", ""), 0), 0.6)
    assert copying.num_live == 0


def test_a_later_incarnation_that_maps_its_pool_finds_no_grant_of_an_earlier_one(core: AgentCore) -> None:
    core.handle(opening(grant()), 0.0)
    *_, reply = core.handle(Asked(Address("D", 2), MapPool(group="d"), 9), 0.5)
    assert isinstance(reply, Reply)
    assert core.num_live == 0
    core.handle(opening(grant("g2", holder_epoch=2)), 0.6)
    assert core.num_live == 1
    core.handle(Asked(Address("D", 2), MapPool(group="d"), 10), 0.7)
    assert core.num_live == 1, "its own grants stay"


def test_the_loss_of_an_older_incarnation_says_nothing_of_a_later_one(core: AgentCore) -> None:
    core.handle(opening(grant(holder_epoch=2)), 0.0)
    assert core.handle(PeerGone(D, "killed"), 0.5) == []
    core.handle(Told(Address("P", 3), together(ready())), 0.5)
    assert core.handle(PeerGone(Address("P", 2), "killed"), 0.5) == []
    assert core.num_live == 1


def test_a_lost_sender_fails_what_it_has_not_announced(core: AgentCore) -> None:
    core.handle(opening(grant("g1", (1, 2))), 0.0)
    core.handle(opening(grant("g2", (3, 4))), 0.0)
    core.handle(Told(P, together(ready("g1"))), 0.0)
    core.handle(Told(P, together(ready("g2", (11,), total=2))), 0.0)
    commands = core.handle(PeerGone(P, "killed"), 0.1)
    assert codes(commands) == ["source_lost"] * 2
    assert [command.message.grant_id for command in commands if isinstance(command, Tell)] == ["g2", "g2"]
    done = PagesPulled(grant_id="g1", num_pages=2, complete=True)
    assert core.handle(CopyDone("g1", CopyEnded(1), 1), 0.2)[0] == Tell("D", done)


def test_a_lost_source_agent_is_unmapped_and_its_transfers_end(core: AgentCore) -> None:
    core.handle(opening(grant()), 0.0)
    core.handle(Told(P, together(ready(source_agent="far"))), 0.0)
    core.handle(SourceMapped(FOREIGN, 8, LAYOUT.digest), 0.0)
    commands = core.handle(PeerGone(Address("far", 1), "killed"), 0.1)
    assert commands[:2] == [UnmapForeign(FOREIGN), CancelPull("g1", 1)]
    assert codes(commands) == ["source_lost"] * 2
    core.handle(CopyDone("g1", CopyEnded(1, "source_lost", ""), 0), 0.2)
    assert gauges(core)["mesh_kv_foreign_pools"] == 0


def test_leases_end_by_themselves(core: AgentCore) -> None:
    core.handle(opening(grant(timeout_s=4)), 0.0)
    assert core.handle(Tick(), 3.9) == []
    assert codes(core.handle(Tick(), 4.0)) == ["deadline_exceeded"]
    assert core.num_live == 0
    assert codes(core.handle(Tick(), 4.5)) == ["deadline_exceeded"], "until the holder closes it"


def test_late_ends_of_copies_are_harmless(core: AgentCore) -> None:
    assert core.handle(CopyDone("gone", CopyEnded(1), 5), 0.0) == []
    core.handle(opening(grant()), 0.0)
    assert core.handle(CopyDone("g1", CopyEnded(1), 5), 0.0) == []
    assert gauges(core)["mesh_kv_transfer_bytes_total"] == 10


def test_draining_takes_no_new_grants_but_ends_old_ones(core: AgentCore) -> None:
    core.handle(opening(grant()), 0.0)
    assert core.handle(Draining(), 0.0) == []
    assert codes(core.handle(opening(grant("g2", (3,))), 0.0)) == ["draining"]
    assert core.handle(opening(grant()), 0.0) == [OPENED]
    assert core.handle(Told(P, together(ready())), 0.0) == [pull()]


def test_every_grant_of_an_earlier_incarnation_is_revoked_however_late_it_came(core: AgentCore) -> None:
    newer = D._replace(epoch=D.epoch + 1)
    core.handle(opening(grant("g1", (1, 2))), 0.0)
    commands = core.handle(opening(grant("g2", (1, 2), holder_epoch=newer.epoch), 7), 1.0)
    assert commands == [Reply(7, GrantsOpened(opened=["g2"]))], "the later incarnation knows nothing of g1"
    assert sessions(core)["g1"].failure.code == "holder_lost"
    core.handle(opening(grant("g3", (5, 6)), 8), 2.0)
    assert not sessions(core)["g3"].has_ended
    core.handle(opening(grant("g4", (7, 8), holder_epoch=newer.epoch), 9), 3.0)
    assert (sessions(core)["g3"].has_ended, sessions(core)["g2"].has_ended) == (True, False)


def test_what_is_noted_of_a_transfer() -> None:
    core = make_core()
    core.note = notes = NoteList()
    core.handle(opening(grant(request_id="r")), 0.0)
    core.handle(Told(P, together(ready())), 0.1)
    core.handle(CopyDone("g1", CopyEnded(1), 2**33, "shm"), 0.2)
    # Asked for again, and announced again after its end: nothing new.
    core.handle(Told(P, together(ready())), 0.3)
    assert notes.take() == [
        (Noted.LENT, "r", 2, 0),
        (Noted.COPYING, "r", 2, 2),
        (Noted.COPIED, "r", 2**32 - 1, key_of("shm")),
        (Noted.COMPLETE, "r", 2, 0),
    ]
    core.handle(opening(grant("g2", (3, 4), request_id="q")), 1.0)
    core.handle(Asked(D, CloseGrant(grant_id="g2"), 1), 1.1)
    core.handle(Asked(D, CloseGrant(grant_id="g2"), 2), 1.2)
    assert notes.take() == [(Noted.LENT, "q", 2, 0), (Noted.FAILED, "q", 0, key_of("grant_closed"))]

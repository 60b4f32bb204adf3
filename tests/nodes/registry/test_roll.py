"""Lists of members made of bytes are what the lists would have been, with the proofs that each reader may see."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.address import Endpoint
from mesh.errors import FrameRefused
from mesh.membership.view import Member
from mesh.wire.frames import SYSTEM_CODEC, Departed, Joined, MembersChanged
from nodes.registry.roll import MAX_BYTES, MAX_MEMBER_BYTES, Roll

REGISTRY = Member("registry", "registry", 1, Endpoint("c", "d"), host="head", proof=b"r")


def member(actor_id: str, epoch: int = 1, proof: bytes = b"p") -> Member:
    return Member(actor_id, "worker", epoch, Endpoint("c", "d"), proof=proof)


def read(shown: list[msgspec.Raw]) -> list[Member]:
    """As whoever is told reads it."""
    joined = Joined(registry_epoch=1, version=1)
    return SYSTEM_CODEC.decode(SYSTEM_CODEC.encode(msgspec.structs.replace(joined, members=shown))).members


def proofs(members: list[Member]) -> dict[str, bytes]:
    return {one.actor_id: one.proof for one in members}


def test_proofs_are_shown_to_members_of_the_host_that_have_one() -> None:
    roll = Roll(REGISTRY)
    roll.take(
        MembersChanged(registry_epoch=1, version=2, upserted=[member("a.d"), member("b.e"), member("c.d", 1, b"")])
    )
    assert proofs(read(roll.shown_to(member("x.d")))) == {"registry": b"", "a.d": b"p", "b.e": b"", "c.d": b""}
    assert set(proofs(read(roll.shown_to(member("x.d", proof=b"")))).values()) == {b""}
    # Who is of none, as on a mesh of one host, sees those that are of none.
    assert proofs(read(roll.shown_to(member("x")))) == {"registry": b"r", "a.d": b"", "b.e": b"", "c.d": b""}


def test_readers_that_see_the_same_share_one_list() -> None:
    roll = Roll(REGISTRY)
    everybody = [member(f"{name}.{host}") for host in "def" for name in "ab"]
    roll.take(MembersChanged(registry_epoch=1, version=2, upserted=everybody))
    readers = [*everybody, member("custom.d", 1, b""), REGISTRY]
    shown = roll.shown_alike(readers, everybody[:1])
    assert [(ids, proofs(read(upserted))) for ids, upserted in shown] == [
        (["a.d", "b.d"], {"a.d": b"p"}),
        (["a.e", "b.e", "a.f", "b.f", "custom.d", "registry"], {"a.d": b""}),
    ]
    assert len(roll.shown_alike(readers, [])) == 1


IDS = st.sampled_from(["a.d", "b.d", "a.e", "a"])
CHANGES = st.lists(
    st.one_of(
        st.builds(member, IDS, st.integers(1, 3), st.sampled_from([b"", b"p", b"q"])),
        st.builds(lambda actor_id: Departed(actor_id=actor_id, epoch=3), IDS),
    )
)


@given(CHANGES, st.builds(member, IDS, st.just(1), st.sampled_from([b"", b"p"])))
def test_it_is_the_list_of_members(changes: list[Member | Departed], reader: Member) -> None:
    roll, model = Roll(REGISTRY), {"registry": REGISTRY}
    for version, change in enumerate(changes):
        if isinstance(change, Member):
            model[change.actor_id] = change
            roll.take(MembersChanged(registry_epoch=1, version=version, upserted=[change]))
        else:
            model.pop(change.actor_id, None)
            roll.take(MembersChanged(registry_epoch=1, version=version, left=[change]))

    def seen(one: Member) -> Member:
        is_near = one.actor_id.partition(".")[2] == reader.actor_id.partition(".")[2]
        return one if reader.proof and is_near else msgspec.structs.replace(one, proof=b"")

    assert {one.actor_id: one for one in read(roll.shown_to(reader))} == {i: seen(one) for i, one in model.items()}
    for ids, upserted in roll.shown_alike([reader], model.values()):
        assert (ids, read(upserted)) == ([reader.actor_id], [seen(one) for one in model.values()])


def announcing(actor_id: str, num_bytes: int, epoch: int = 1) -> Member:
    return msgspec.structs.replace(member(actor_id, epoch), attributes={"x": b"y" * num_bytes})


def test_nobody_announces_so_much_that_others_cannot_be_told_of_all() -> None:
    roll, version = Roll(REGISTRY), 1

    def change(upserted: list[Member], left: list[Departed]) -> None:
        nonlocal version
        version += 1
        roll.take(MembersChanged(registry_epoch=1, version=version, upserted=upserted, left=left))

    with pytest.raises(FrameRefused, match=r"big#1 announces \d+ bytes, but at most 65536 are accepted") as large:
        roll.require_room(announcing("big", MAX_MEMBER_BYTES))
    assert large.value.code == "too_large"
    each = MAX_MEMBER_BYTES - 200
    for number in range(MAX_BYTES // MAX_MEMBER_BYTES):
        roll.require_room(announcing(f"a{number}", each))
        change([announcing(f"a{number}", each)], [])
    SYSTEM_CODEC.encode(Joined(registry_epoch=1, version=1, members=read(roll.shown_to(REGISTRY))))
    with pytest.raises(FrameRefused, match="all members together would announce") as full:
        roll.require_room(announcing("b", each))
    assert full.value.code == "registry_full"
    # As one that is a member already, and where one has left.
    roll.require_room(announcing("a7", each))
    change([announcing("a0", 10)], [])
    roll.require_room(announcing("b", each - 1000))
    change([], [Departed(actor_id="a1", epoch=1, reason="")])
    roll.require_room(announcing("b", each))
    change([announcing("a2", each, 2)], [Departed(actor_id="a2", epoch=1, reason="replaced")])
    change([announcing("b", each), announcing("c", each)], [])
    with pytest.raises(FrameRefused, match="all members together would announce"):
        roll.require_room(announcing("d", each))

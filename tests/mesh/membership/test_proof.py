"""A proof is of one incarnation in one role of one mesh, and nobody else's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.address import Address, Endpoint
from mesh.errors import FrameRefused
from mesh.membership.keys import AllowList, HostKey
from mesh.membership.proof import Credentials, HostSecret, prove
from mesh.membership.view import Member

NAMES = st.text(max_size=8)
IDENTITIES = st.tuples(NAMES, NAMES, st.integers(0, 1 << 44), NAMES)
KEYS = st.binary(min_size=1, max_size=64)
SECRET = HostSecret(mesh="m", host="", key=b"k" * 32, supervised=["gateway-0", "supervisor"], roles=["gateway"])


def member(actor_id="gateway-0", epoch=2, role="gateway", proof=b""):
    return Member(actor_id=actor_id, role=role, epoch=epoch, endpoint=Endpoint("", ""), proof=proof)


def proved(actor_id="gateway-0", epoch=2, role="gateway"):
    return member(actor_id, epoch, role, SECRET.prove(actor_id, epoch, role))


def test_the_proof_that_the_protocol_page_shows():
    key = bytes(range(32))
    assert prove(key, "default", "gateway-0", 3, "gateway").hex() == "0107bde21fd38a1f9e9825831f73d625"


@given(KEYS, IDENTITIES, IDENTITIES)
def test_proofs_are_equal_where_everything_that_they_name_is(key, one, other):
    assert (prove(key, *one) == prove(key, *other)) == (one == other)


@given(IDENTITIES, st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_another_secret_gives_another_proof(identity, one, other):
    assert (prove(one, *identity) == prove(other, *identity)) == (one == other)


@given(st.lists(st.integers(0, 12), min_size=3, max_size=3))
def test_what_one_name_loses_the_next_does_not_win(cuts):
    """The texts run into each other at no cut."""
    text = "kvmeshgatewa"
    a, b, c = sorted(cuts)
    names = text[:a], text[a:b], 7, text[b:c] + text[c:]
    shifted = text[:a] + text[a:b], "", 7, text[b:]
    assert (prove(b"k", *names) == prove(b"k", *shifted)) == (names == shifted)


@pytest.mark.parametrize(
    "shown",
    [
        member(proof=b"\0" * 16),
        member(proof=b"short"),
        member(epoch=3, proof=proved().proof),
        member(role="registry", proof=proved().proof),
        member("gateway-1", proof=proved().proof),
        member(proof=prove(b"another", "m", "gateway-0", 2, "gateway")),
        member(proof=prove(SECRET.key, "another", "gateway-0", 2, "gateway")),
        member("custom-0", role="custom", proof=b"x"),
    ],
)
def test_a_proof_of_anything_else_is_refused(shown):
    with pytest.raises(FrameRefused) as caught:
        SECRET.check(shown, None)
    assert caught.value.code == "bad_proof"


@pytest.mark.parametrize(
    ("shown", "known"),
    [
        (member(), None),
        (member(role="custom"), None),
        (member("gateway-9"), None),
        (member("mine", role="registry"), None),
        (member("mine", role="supervisor"), None),
        (member("by-hand", role="custom"), proved("by-hand", 1, "custom")),
    ],
)
def test_supervised_ids_and_roles_and_who_is_known_by_a_proof_need_one(shown, known):
    secret = HostSecret.draw("m", "", SECRET.supervised, SECRET.roles)
    with pytest.raises(FrameRefused) as caught:
        secret.check(shown, known)
    assert caught.value.code == "no_proof"


def test_who_is_nobody_special_needs_none_and_proves_nothing():
    assert SECRET.check(proved(), None)
    assert not SECRET.check(member("custom-0", role="custom"), member("custom-0", 1, "custom"))


def test_of_other_hosts_nothing_is_proved_and_nobody_refused():
    here = HostSecret.draw("m", "d", ["supervisor.d", "gateway-0.d"], ["gateway"])
    assert not here.check(member("gateway-0.head"), None)
    assert not here.check(member("registry", role="registry"), None), "its own host asks it for one"
    with pytest.raises(FrameRefused):
        here.check(member("gateway-7.d"), None)
    hub = HostSecret.draw("m", "head", ["registry"], ["gateway"])
    with pytest.raises(FrameRefused):
        hub.check(member("registry", role="registry"), None)
    credentials = Credentials(here, b"", lambda _: None, tuple)
    assert credentials.believe(Address("supervisor.head", 1), is_proved=False)
    assert not credentials.believe(Address("words-0.d", 1), is_proved=False)


def test_who_may_have_a_supervisor_is_believed_of_other_hosts():
    keys = {host: HostKey.new(host).public_key for host in ("head", "d", "evil")}
    allowed = AllowList(0, ()).with_host("head", keys["head"], ("registry",)).with_host("d", keys["d"])
    allowed = allowed.with_host("evil", keys["evil"], ("worker",))
    secret = HostSecret.draw("m", "head", ["registry"], ["gateway"])
    head = Credentials(secret, b"", lambda _: None, tuple, allowed.vet)
    vouching = [who for who in ("words-0.head", "words-0.d", "worker-x.evil", "x.gone") if head.may_vouch(who)]
    assert vouching == ["words-0.head", "words-0.d"]
    assert Credentials(secret, b"", lambda _: None, tuple).may_vouch("worker-x.evil"), "without keys nobody is known"


def test_who_has_no_secret_checks_nobody_and_goes_by_the_registrys_word():
    known = {"gateway-0": proved()}
    credentials = Credentials(None, b"mine", known.get, lambda: ["registry"])
    assert credentials.own("a", 1, "r") == b"mine"
    assert credentials.vet(proved())
    assert not credentials.vet(member(proof=b"invented"))
    assert not credentials.vet(member("custom-0"))
    shown = [Address("registry", 9), Address("gateway-0", 2)]
    assert [credentials.are_shown_to(one) for one in [*shown, Address("gateway-0", 3), Address("x", 1)]] == [
        True, True, False, False,
    ]  # fmt: skip


def test_a_secret_is_in_no_log():
    assert repr(SECRET) == "HostSecret(mesh='m')"
    assert "kkkk" not in str([SECRET])

"""Keys of hosts and the list of those that a mesh takes: what can be written down, and what a change makes of it."""

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from mesh.membership.keys import AllowedHost, AllowList, BadKey, HostKey

KEYS = [HostKey.new(f"h{number}") for number in range(4)]
HEAD = AllowList(0, ()).with_host("h0", KEYS[0].public_key, ("registry", "*"))


def test_a_pair_keeps_its_secret_to_itself():
    own = HostKey.new("d")
    own.check()
    assert own.secret_key not in repr(own)
    assert own.public_key in repr(own)
    with pytest.raises(BadKey, match="does not match its secret key"):
        HostKey("d", own.secret_key, own.secret_key).check()
    with pytest.raises(BadKey, match="'7' is not a valid host name"):
        HostKey.new("7")


def test_no_public_key_looks_like_an_option(monkeypatch):
    drawn = [(b"-" + bytes([48 + number]) * 39, b"s" * 40) for number in range(3)]
    monkeypatch.setattr(zmq, "curve_keypair", lambda: drawn.pop() if drawn else (b"x-" * 20, b"s" * 40))
    assert HostKey.new("d").public_key == "x-" * 20


def test_roles_are_any_but_the_registry_s_unless_said():
    default, some, head = AllowedHost("a", ""), AllowedHost("a", "", ("worker",)), HEAD.registry()
    assert [one.may_have("gateway") for one in (default, some, head)] == [True, False, True]
    assert [one.may_have("worker") for one in (default, some, head)] == [True, True, True]
    assert [one.may_have("registry") for one in (default, some, head)] == [False, False, True]
    # Each asks before it joins.
    assert all(one.may_have("meshctl") for one in (default, some, head))


@pytest.mark.parametrize(
    ("host", "key", "roles", "why"),
    [
        ("h1", KEYS[0].public_key, None, "host h0 already has that public key"),
        ("h1", KEYS[1].public_key[:-1], None, "is not a public key"),
        ("h1", KEYS[1].public_key[:-1] + "~", None, "is not a public key"),
        ("h1", KEYS[1].public_key + "\n", None, "is not a public key"),
        ("H1", KEYS[1].public_key, None, "is not a valid host name"),
        ("h1\n", KEYS[1].public_key, None, "is not a valid host name"),
        ("h1", KEYS[1].public_key, ("a role",), "is not a valid role"),
        ("h1", KEYS[1].public_key, ("registry",), "exactly one host must be granted the registry"),
        ("h0", KEYS[0].public_key, None, "exactly one host must be granted the registry"),
    ],
    ids=map(str, range(9)),
)
def test_what_cannot_be_on_a_list(host, key, roles, why):
    with pytest.raises(BadKey, match=why):
        HEAD.with_host(host, key, roles)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3), st.integers(1, 3))))
def test_every_change_is_a_later_list_that_holds_together(changes):
    now = HEAD
    for adds, host, key in changes:
        before, name = now, f"h{host}"
        try:
            now = now.with_host(name, KEYS[key].public_key) if adds else now.without(name)
        except BadKey:
            holder = now.find(KEYS[key].public_key)
            assert holder is not None
            assert holder.host != name
            continue
        now.check()
        assert now.version == before.version + (now.hosts != before.hosts or adds)
        known = now.host(name)
        assert (known is not None) == adds
        assert known is None or now.find(known.public_key) == known
    assert now.registry() == HEAD.registry()

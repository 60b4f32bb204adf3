"""A guard goes by the list of keys as it is, whoever has looked at its file before."""

import pytest

from mesh.errors import FrameRefused
from mesh.membership.keys import AllowedHost, AllowList, HostKey
from mesh.runtime.key_files import KeyDirectory, KeyRing
from mesh.transport.guard import Guard


def test_a_change_that_somebody_else_has_seen_first(tmp_path) -> None:
    head, d = HostKey.new("head"), HostKey.new("d")
    directory = KeyDirectory(tmp_path)
    directory.write_key(head)
    allowed = AllowList(1, (AllowedHost("head", head.public_key, ("*", "registry")),))
    directory.write_allowed(allowed)
    ring = KeyRing(directory)
    guard = Guard(ring)
    user = f"d {d.public_key}".encode()
    with pytest.raises(FrameRefused, match="is not allowed"):
        guard.vet(user, "worker-0.d")
    ring.write(allowed.with_host("d", d.public_key))
    # As the supervisor does, which restores a damaged file.
    assert ring.poll()
    assert guard.is_changed()
    guard.vet(user, "worker-0.d")
    assert not guard.is_changed()
    ring.write(ring.allowed.without("d"))
    assert ring.restore() == ""
    assert guard.is_changed()
    with pytest.raises(FrameRefused, match="is not allowed any more"):
        guard.vet(user, "worker-0.d")

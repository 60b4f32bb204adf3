"""A guard goes by the list of keys as it is, whoever has looked at its file before."""

import asyncio

import pytest
import zmq

from mesh.errors import FrameRefused
from mesh.membership.keys import AllowedHost, AllowList, HostKey
from mesh.runtime.key_files import KeyDirectory, KeyRing
from mesh.transport.guard import Guard
from mesh.transport.zeromq_zap import Door
from tests.mesh.mesh_under_test import until


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
    with pytest.raises(FrameRefused, match="is not allowed"):
        guard.vet(user, "worker-0.d")


async def test_a_door_that_is_asked_in_another_version_says_so(tmp_path) -> None:
    directory, head = KeyDirectory(tmp_path), HostKey.new("head")
    directory.write_key(head)
    directory.write_allowed(AllowList(1, (AllowedHost("head", head.public_key, ("*", "registry")),)))
    refused = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as asker:
        door = Door(
            asyncio.get_running_loop(), context, KeyRing(directory), lambda *what: refused.append(what), lambda: None
        )
        asker.connect("inproc://zeromq.zap.01")
        request = (b"", b"9.9", b"1", b"kvmesh", b"10.0.0.7", b"", b"NULL")
        asker.send_multipart(request)
        asker.send_multipart((b"", b"1.0", b"2", b"kvmesh"))
        asker.send_multipart((b"", b"1.0", b"3", *request[3:]))
        answers = []
        while len(answers) < 3:
            await until(lambda: asker.poll(0))
            answers.append(asker.recv_multipart()[1:4])
        door.close()
    assert answers == [[b"9.9", b"1", b"500"], [b"1.0", b"2", b"500"], [b"1.0", b"3", b"200"]]
    assert refused == []

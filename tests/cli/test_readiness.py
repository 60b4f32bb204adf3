"""What a start that is not over waits for: the gateway's reasons, and hosts that have not come."""

import asyncio

import pytest

from cli.plan.hosts import HostSettings
from cli.plan.settings import Settings
from cli.supervisor.told.readiness import absent_hosts, unready_reason
from mesh.address import Endpoint
from mesh.membership.view import Member, Membership
from mesh.testing.ports import free_port
from tests.cli.answering import answering

BODY = b'{"status":"not_ready","reasons":["no scheduler is ready","no worker is ready"]}'


def answered(*pieces: bytes) -> str:
    """What is read of an answer that comes in these pieces."""

    async def main() -> str:
        async with answering(*pieces) as port:
            return await unready_reason("0.0.0.0", port)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ((b"HTTP/1.1 200 OK\r\n\r\n", b'{"status":"ok","reasons":[]}'), ""),
        ((b"HTTP/1.1 503 Service Unavailable\r\n\r\n" + BODY,), "no scheduler is ready; no worker is ready"),
        ((b"HTTP/1.1 503 Service Unavailable\r\n\r\n",), "the gateway is not ready"),
        ((b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}",), "the gateway is not ready"),
        ((), "the gateway does not answer"),
    ],
)
def test_what_the_gateway_lacks(pieces: tuple[bytes, ...], reason: str) -> None:
    assert answered(*pieces) == reason


def test_nobody_listens() -> None:
    assert asyncio.run(unready_reason("127.0.0.1", free_port())) == "the gateway does not answer"


def test_hosts_that_have_not_come() -> None:
    hosts = {name: HostSettings(address=f"127.0.0.{n}", decode=n) for n, name in enumerate(("head", "p", "d"))}
    settings, members = Settings(hosts=hosts, on="head"), Membership()
    assert absent_hosts(settings, members) == "hosts p, d are not in the mesh"
    known = [Member(f"supervisor.{host}", "supervisor", 1, Endpoint("c", "d")) for host in "pd"]
    members.reset(1, 1, known[:1])
    assert absent_hosts(settings, members) == "host d is not in the mesh"
    members.reset(1, 2, known)
    assert absent_hosts(settings, members) == absent_hosts(Settings(), Membership()) == ""

"""Who of a host that ends is still needed by others, as gateways and supervisors say."""

import asyncio
from typing import Any

import pytest

from cli.protocol import ActorList, ActorStatus, ListActors
from cli.supervisor.hosts import others
from cli.supervisor.hosts.others import until_others_are_done
from mesh.address import Address, Endpoint
from mesh.errors import DeadlineExceeded
from mesh.membership.view import READY, Member
from mesh.supervision.events import DRAINING
from mesh.wire.frames import StatsReply, StatsRequest
from nodes.actor_figures import CALLS_IN_FLIGHT
from tests.nodes.recording_context import RecordingContext

ROLES = ["registry", "tokenizer", "detokenizer", "worker"]


def member(actor_id: str, role: str) -> Member:
    return Member(actor_id=actor_id, epoch=1, role=role, host=actor_id[-1], endpoint=Endpoint("c", "d"), state="ready")


MEMBERS = [
    member("gateway-0.b", "gateway"), member("gateway-0.c", "gateway"),
    member("supervisor.b", "supervisor"), member("supervisor.c", "supervisor"),
]  # fmt: skip


def calls(num: int) -> StatsReply:
    return StatsReply(counters={}, gauges={CALLS_IN_FLIGHT: float(num)}, histograms={})


def there(*roles: str, state: str = READY, ends: bool = False, supervised: bool = True) -> ActorList:
    nowhere = Endpoint("", "")
    rows = [ActorStatus(f"{role}-0", role, 1, 1, nowhere, state, supervised=supervised) for role in roles]
    return ActorList("m", "", "echo", ready=True, actors=rows, ends=ends)


def looks_until_done(*looks: dict[str, Any]) -> int:
    """How often was looked before nobody was waited for; each look finds its own answers, the last one from then on."""
    num_looks = 0

    async def answer(actor_id: str, message: Any) -> Any:
        assert isinstance(message, StatsRequest if actor_id.startswith("gateway") else ListActors)
        found = looks[min(num_looks, len(looks)) - 1].get(actor_id, DeadlineExceeded("no answer"))
        if isinstance(found, Exception):
            raise found
        return found

    async def main() -> None:
        nonlocal num_looks
        needed = others._are_needed

        async def looking(*given: Any) -> bool:
            nonlocal num_looks
            num_looks += 1
            return await needed(*given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(others, "_are_needed", looking)
            patch.setattr(others, "_LOOK_S", 0.0)
            async with asyncio.timeout(10):
                await until_others_are_done(RecordingContext(Address("supervisor.a", 1), answer, MEMBERS), ROLES)  # type: ignore[arg-type]

    asyncio.run(main())
    return num_looks


BUSY = {"gateway-0.b": calls(0), "gateway-0.c": calls(3)}
IDLE = {"gateway-0.b": calls(0), "gateway-0.c": calls(0)}


def test_whoever_has_no_calls_needs_nobody() -> None:
    assert looks_until_done(IDLE) == 1
    assert looks_until_done({}) == 1, "gateways that do not answer are gone, or will be"


def test_the_last_of_a_mesh_stays_until_the_last_call_has_ended() -> None:
    assert looks_until_done(BUSY, BUSY, BUSY, IDLE) == 4


def test_a_host_that_goes_on_takes_its_place() -> None:
    assert looks_until_done(BUSY | {"supervisor.c": there("gateway", "tokenizer", "detokenizer")}) == 1


@pytest.mark.parametrize(
    "found",
    [
        there("tokenizer", "detokenizer", ends=True),
        there("tokenizer"),
        there("tokenizer", "detokenizer", state=DRAINING),
        there("tokenizer", "detokenizer", supervised=False),
    ],
    ids=["ends too", "has no detokenizer", "is drained", "tells of another's"],
)
def test_a_host_that_cannot_take_its_place_is_not_counted_on(found: ActorList) -> None:
    assert looks_until_done(BUSY | {"supervisor.b": found}, IDLE) == 2

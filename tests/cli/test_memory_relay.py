"""Requests about memory find the agents whose pools are meant, and what they say comes back as one answer."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cli.supervisor.hosts.memory_relay import relay
from mesh.address import Endpoint
from mesh.errors import MeshError, PeerLost, RemoteError
from mesh.membership.view import READY, Member, Membership
from nodes.protocol.memory import GroupMemory, ListMemory, MemoryList, ReleaseMemory, ResumeMemory


def ask(
    wanted: Any, *agents: dict[str, Any], fails: Exception | None = None, absent: str = ""
) -> tuple[Any, dict[str, Any]]:
    """What is answered, and what each agent was asked."""
    members, asked = Membership(), {}
    members.reset(1, 1, [
        Member(f"agent-{number}", "kv_agent", 1, Endpoint("", ""), READY, attributes=attributes)
        for number, attributes in enumerate(agents)
    ])  # fmt: skip

    async def answered(actor_id: str, message: Any, *, timeout_s: float) -> Any:
        asked[actor_id] = message
        if fails is not None:
            raise fails
        groups = agents[int(actor_id[-1])]["groups"]
        return SimpleNamespace(message=MemoryList(groups=[GroupMemory(group=group, state="held") for group in groups]))

    answer: Any
    why = ""
    try:
        answer = asyncio.run(relay(SimpleNamespace(members=members, ask=answered), wanted, absent))  # type: ignore[arg-type]
    except MeshError as error:
        answer, why = (error.code, error.retryable), error.message
    assert absent in (why or answer.note)
    return answer, asked


TWO = ({"groups": ["d", "p"]}, {"groups": ["m"]})


def names(answer: Any) -> list[str]:
    return [one.group for one in answer.groups]


def test_wishes_are_split_by_owner() -> None:
    answer, asked = ask(ReleaseMemory(groups=["m", "d"], keep_kv=True), *TWO)
    assert names(answer) == ["d", "m"]
    assert asked == {
        "agent-0": ReleaseMemory(groups=["d"], keep_kv=True),
        "agent-1": ReleaseMemory(groups=["m"], keep_kv=True),
    }
    answer, asked = ask(ResumeMemory(groups=["p"]), *TWO)
    assert (names(answer), asked) == (["p"], {"agent-0": ResumeMemory(groups=["p"])})


@pytest.mark.parametrize("wanted", [ListMemory(), ReleaseMemory(), ResumeMemory(groups=["x"])])
@pytest.mark.parametrize("agents", [(), TWO])
def test_hosts_that_are_not_in_the_mesh_are_named(wanted: Any, agents: Any) -> None:
    ask(wanted, *agents, absent="host p is not in the mesh")


def test_none_named_is_all() -> None:
    answer, asked = ask(ListMemory(), *TWO)
    assert (names(answer), len(asked)) == (["d", "m", "p"], 2)
    answer, asked = ask(ResumeMemory(), *TWO)
    assert asked["agent-0"] == ResumeMemory(groups=["d", "p"])


@pytest.mark.parametrize(
    ("agents", "wanted", "fails", "expected"),
    [
        (TWO, ResumeMemory(groups=["x", "d"]), None, ("unknown_group", False)),
        ((), ListMemory(), None, ("no_agent", True)),
        (({"groups": 7},), ListMemory(), None, ("no_agent", True)),
        (TWO, ListMemory(), PeerLost("agent-0"), ("peer_lost", True)),
        (TWO, ReleaseMemory(), RemoteError("memory_saver_off", "it is"), ("memory_saver_off", False)),
    ],
)
def test_what_cannot_be_asked_is_said(agents: Any, wanted: Any, fails: Any, expected: tuple[str, bool]) -> None:
    answer, asked = ask(wanted, *agents, fails=fails)
    assert answer == expected
    assert bool(asked) == (fails is not None)

"""How long a stream stands still when a host is cut off or paused: as long as it takes to notice, and little more."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from mesh.simulation.faults import Faults
from tests.simulation.hosted_mesh import DECODE, HEAD, PREFILL, HostedMesh
from tests.simulation.scenario import Client, ask_all, judge_outcome, play

NOTICED_S = 2.0
"""The most that three of the transport's heartbeats take, at half a second each."""
CUT_S = 10.0
PROMPT = "a prompt that is too long for decode to prefill it alone; its answer is as long as it is itself, and so on."
STEP_MS = 30


def _mesh() -> HostedMesh:
    mesh = HostedMesh(1, Faults(), False)
    step_ms = dict.fromkeys(mesh.groups, STEP_MS)
    mesh.speeds = mesh.speeds._replace(num_pages=96, num_prefill_pages=96, step_ms=step_ms, restart_s=(0.5, 0.5))
    return mesh


async def _cut_off(mesh: HostedMesh) -> None:
    others = [HEAD, PREFILL]
    mesh.cut_off(DECODE, others, CUT_S, hold=False, one_way=False)
    await asyncio.sleep(NOTICED_S)
    mesh.network.sever(mesh.ids_of(DECODE), [one for other in others for one in mesh.ids_of(other)])


async def _paused(mesh: HostedMesh) -> None:
    others = [one for other in (PREFILL, DECODE) for one in mesh.ids_of(other)]
    pause = asyncio.ensure_future(mesh.pause(HEAD, CUT_S))
    await asyncio.sleep(NOTICED_S)
    mesh.network.sever(mesh.ids_of(HEAD), others)
    await pause


async def _killed(mesh: HostedMesh) -> None:
    mesh.processes[f"scheduler-decode-0.{DECODE}"].kill()


@pytest.mark.parametrize(
    ("blow", "most_s", "is_kept"),
    [(_cut_off, NOTICED_S + 0.7, False), (_paused, CUT_S + 0.2, True), (_killed, 1.0, True)],
)
def test_a_stream_stands_still_for_little_longer_than_it_takes_to_notice(
    blow: Callable[[HostedMesh], Coroutine[Any, Any, None]], most_s: float, is_kept: bool
) -> None:
    mesh = _mesh()
    stalls: list[float] = []
    drawn: list[float] = []

    def judge(mesh: Any, client: Client, outcome: Any, elapsed_s: float) -> str:
        stalls.append(outcome.stall_s)
        return judge_outcome(mesh, client, outcome, elapsed_s)

    async def scenario() -> list[str]:
        await mesh.start()
        client = Client(0.0, PROMPT, 200, 4, "", 1, None)
        asked = asyncio.ensure_future(ask_all(mesh, [client], judge))
        await asyncio.sleep(1.5)
        await blow(mesh)
        problems = await asked
        drawn.append(mesh.actors[f"scheduler-prefill-0.{PREFILL}"].totals()["mesh_scheduler_output_tokens"])
        return problems

    play(mesh, scenario())
    assert len(stalls) == 4
    assert (drawn[0] == len(stalls)) == is_kept, "prefill draws the first token of each, and else in decode's place"
    assert 0.2 < max(stalls) < most_s


def test_who_comes_after_it_was_noticed_does_not_wait_for_the_host() -> None:
    mesh = _mesh()
    took: list[float] = []

    def judge(mesh: Any, client: Client, outcome: Any, elapsed_s: float) -> str:
        took.append(elapsed_s)
        return judge_outcome(mesh, client, outcome, elapsed_s)

    async def scenario() -> list[str]:
        await mesh.start()
        await _cut_off(mesh)
        return await ask_all(mesh, [Client(at_s, PROMPT, 8, 1, "", 1, None) for at_s in (0.1, 1.0, 2.5)], judge)

    play(mesh, scenario())
    assert len(took) == 3
    assert max(took) < 1.0

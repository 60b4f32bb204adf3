"""A storm over a supervisor and a server that are played, with real processes to strike."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cli.bench.client import Server
from cli.chaos.asked import Asked
from cli.chaos.blows import Blows
from cli.chaos.report import Fallen, Report, summarize
from cli.chaos.storm import Storm
from cli.chaos.striker import Striker
from cli.errors import CliError, NotRunning
from cli.protocol import ActorList
from mesh.supervision.events import STARTING
from tests.cli.manifests import record
from tests.cli.statuses import actor
from tests.cli.streaming import HEAD, chunk, event, streaming

WORKER = "worker-0"


def good(body: dict[str, Any]) -> bytes:
    """The same to all: `ab`."""
    choice = {"index": 0, "text": "ab", "finish_reason": "length", "token_ids": [1, 2]}
    if body.get("stream"):
        return HEAD + chunk(event(choices=[choice])) + chunk(b"data: [DONE]\n\n") + chunk(b"")
    whole = json.dumps({"choices": [choice]}).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(whole), whole)


class Played:
    """A mesh of one worker, which is this process, and gets its next epoch when it is dead."""

    def __init__(self, process: Any) -> None:
        self.process = process
        self.epoch = 1
        self.state = "ready"
        self.lives = self.comes_back = True
        self.told: list[Fallen] = []

    async def ask(self, question: Any, answer_type: Any, timeout_s: float = 3.0) -> Any:
        if not self.lives:
            raise NotRunning("it does not answer", why="it is gone", do="nothing")
        if self.process.poll() is not None:
            self.epoch, self.state = (2, self.state) if self.comes_back else (1, STARTING)
        known = actor(WORKER, epoch=self.epoch, state=self.state, num_deaths=self.epoch - 1)
        return ActorList("m", "http://x", "tiny", True, [known, actor("gateway-0")])

    @contextlib.asynccontextmanager
    async def storm(self, *kinds: Any, answer: Any = good) -> AsyncIterator[Storm]:
        async with streaming(lambda _: (answer(server.bodies[-1]), "close")) as server:
            target = Server.at(server.url)
            blows = Blows(1, kinds, {WORKER: "worker"})
            striker = Striker(lambda: [record(self.process, actor_id=WORKER)], target, "tiny")
            yield Storm(
                self.ask, lambda: self.lives, target, Asked("tiny", 1), blows, striker,
                num_clients=2, timeout_s=5.0, say=self.told.append,
            )  # fmt: skip


def told_by(storm: Storm) -> Report:
    return summarize(storm.seen(), 2.0)


async def test_who_is_killed_is_told_with_how_long_it_took(stranger) -> None:
    mesh = Played(stranger)
    async with mesh.storm("kill") as storm:
        await storm.run(1.5, 0.3)
    report = told_by(storm)
    assert stranger.returncode == -signal.SIGKILL
    first, *others = report.blows
    assert (first.landed, first.settled_s is None) == (True, False)
    assert others
    assert not any(one.landed for one in others), "nobody was there any more"
    assert (report.failed, report.unsettled, report.num_deaths, report.unstruck) == (False, "", 1, [])
    assert report.total.sent > 2
    assert (report.total.lost, report.total.different) == (0, 0)
    assert len(mesh.told) == len(report.blows)


async def test_other_answers_than_before_are_found(stranger) -> None:
    mesh = Played(stranger)

    def answer(body: dict[str, Any]) -> bytes:
        return good(body).replace(b"ab", b"xy") if mesh.told else good(body)

    async with mesh.storm("kill", answer=answer) as storm:
        await storm.run(1.0, 0.3)
    report = told_by(storm)
    assert report.failed
    assert report.total.different > 0


async def struck_then(storm: Storm, do: Callable[[], None]) -> None:
    """Run it, `do` that once somebody was struck, and see that it ends by that."""
    running = asyncio.create_task(storm.run(600.0, 0.2))
    async with asyncio.timeout(20.0):
        while not storm.seen().fallen:
            await asyncio.sleep(0.01)
        do()
        await running


async def test_an_interrupt_wakes_whoever_is_stopped_and_is_not_waited_for(stranger) -> None:
    mesh = Played(stranger)
    async with mesh.storm("stop") as storm:
        await struck_then(storm, storm.interrupt)
    assert [one.blow.kind for one in mesh.told] == ["stop"]
    assert Path(f"/proc/{stranger.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T"
    assert not told_by(storm).failed


async def test_a_mesh_that_ends_ends_the_storm_and_is_a_failure(stranger) -> None:
    mesh = Played(stranger)
    async with mesh.storm("kill") as storm:
        await struck_then(storm, partial(setattr, mesh, "lives", False))
    report = told_by(storm)
    assert report.failed
    assert "the mesh has ended" in report.unsettled


async def test_who_does_not_come_back_is_a_failure(stranger, monkeypatch) -> None:
    monkeypatch.setattr("cli.chaos.storm._SETTLE_S", 0.5)
    mesh = Played(stranger)
    mesh.comes_back = False
    async with mesh.storm("kill") as storm:
        await storm.run(0.5, 0.2)
    report = told_by(storm)
    assert report.failed
    assert report.unsettled == f"{WORKER} is starting"
    assert report.blows[0].settled_s is None


async def test_no_storm_over_a_mesh_that_is_not_well(stranger, monkeypatch) -> None:
    monkeypatch.setattr("cli.chaos.storm._FIRST_S", 0.3)
    mesh = Played(stranger)
    mesh.state = STARTING
    async with mesh.storm("kill") as storm:
        with pytest.raises(CliError, match="not ready for a storm"):
            await storm.run(1.0, 0.2)
    mesh.state = "ready"
    refused = b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\nfull"
    async with mesh.storm("kill", answer=lambda _: refused) as storm:
        with pytest.raises(CliError, match="16 of 16 requests failed before anybody was struck"):
            await storm.run(1.0, 0.2)
    assert stranger.poll() is None

"""Agents of other people against `tiny` with prefill apart: each calls two tools and answers from their results.

What they do is in `agents/`, in their own environments; each says by which ways it asked and what it was told.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import node_with, python_with
from tests.serving.conftest import RunningMesh, start_mesh

# Twelve minutes of them where eight others share two cores; installing takes most.
pytestmark = [pytest.mark.process, pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(1800)]

AGENTS = Path(__file__).parent / "agents"
DISAGGREGATED = ("--model", "tiny", "--prefill", "1", "--decode", "1", "--local-prefill-max", "0")
RUN_TIMEOUT_S = 400
"""litellm's imports alone took 20 s there."""
FIRST = ("openai-agents==0.24.0", "pydantic-ai-slim[openai,anthropic]==2.68.0", "litellm==1.110.2")
SECOND = (
    "langchain==1.5.2", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10", "instructor==1.17.0",
    "smolagents[openai]==1.26.0",
)  # fmt: skip
OF_NPM = (
    "openai@6.49.0", "ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/openai-compatible@2.0.92",
    "@ai-sdk/anthropic@3.0.140", "zod@4.6.7",
)  # fmt: skip
TOLD = "Weather in Rome: 21 degrees and sunny\nTime in Paris: 12:30"
CLIENTS = {
    "openai_agents": (FIRST, 6, {TOLD}),
    "pydantic_ai": (FIRST, 6, {TOLD}),
    "litellm": (FIRST, 10, {TOLD}),
    "langchain": (SECOND, 6, {TOLD}),
    # A colour of the type that it asked for, and what both tools said.
    "instructor": (SECOND, 5, {"green", "yellow"}),
    "smolagents": (SECOND, 2, {"12:30\n21 degrees and sunny"}),
}
"""Where each is installed, in how many ways it asks, and what it may be told."""
NUM_KILLS = 4


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    with start_mesh(tmp_path_factory.mktemp("mesh") / "up.log", *DISAGGREGATED) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], str]:
    """Interpreters by what they have: each is made when the first test wants it."""

    class Pythons(dict[tuple[str, ...], str]):
        def __missing__(self, packages: tuple[str, ...]) -> str:
            self[packages] = python_with(tmp_path_factory.mktemp("python"), packages)
            return self[packages]

    return Pythons()


@pytest.fixture(scope="module")
def of_npm(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """node, and where its packages and our scripts are."""
    folder = tmp_path_factory.mktemp("node")
    node = node_with(folder, OF_NPM)
    for script in AGENTS.glob("*.mjs"):
        shutil.copy(script, folder)
    return node, folder


def answers(*command: Any) -> dict[str, str]:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("client", CLIENTS)
def test_an_agent_answers_from_results(mesh: RunningMesh, pythons: Any, client: str) -> None:
    packages, num_ways, may_say = CLIENTS[client]
    found = answers(pythons[packages], AGENTS / f"with_{client}.py", mesh.url, 1)
    assert len(found) == num_ways
    assert set(found.values()) <= may_say, found


@pytest.mark.parametrize(("client", "num_ways"), [("openai", 5), ("ai", 8)])
def test_an_agent_of_npm_answers_from_results(mesh: RunningMesh, of_npm: Any, client: str, num_ways: int) -> None:
    node, folder = of_npm
    found = answers(node, folder / f"with_{client}.mjs", mesh.url)
    assert len(found) == num_ways
    assert set(found.values()) == {TOLD}, found


def test_an_agent_does_not_see_that_workers_die(mesh: RunningMesh, pythons: Any) -> None:
    packages, num_ways, _ = CLIENTS["openai_agents"]
    command = [pythons[packages], str(AGENTS / "with_openai_agents.py"), mesh.url, str(NUM_KILLS + 1)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        found = []
        for line in agent.stdout:
            found.append(json.loads(line))
            if len(found) <= NUM_KILLS:
                # Each round takes a second or more, and the next has just begun.
                os.kill(worker(mesh)["pid"], signal.SIGKILL)
        assert agent.wait(RUN_TIMEOUT_S) == 0
    assert [len(one) for one in found] == [num_ways] * (NUM_KILLS + 1)
    assert {text for one in found for text in one.values()} == {TOLD}
    assert worker(mesh)["num_starts"] > NUM_KILLS


def worker(mesh: RunningMesh) -> dict[str, Any]:
    return next(one for one in mesh.ps() if one["actor_id"] == "worker-decode-0")

"""One mesh of `tiny`, prefill and decode apart, for all tests of a file."""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from tests.chaos.chaos_mesh import ChaosMesh
from tests.chaos.streams import Answer, Wave, bodies
from tests.process.conftest import Host

MESH = ("--model", "tiny", "--prefill", "1", "--decode", "1", "--detokenizers", "2")


@contextlib.contextmanager
def started(**environment: str) -> Iterator[ChaosMesh]:
    """A settled mesh, which leaves nothing behind at the end."""
    # Under /tmp and short: paths of sockets are at most a hundred bytes.
    host = Host(tempfile.mkdtemp(prefix="kc"))
    try:
        process = host.up(*MESH, **environment)
        chaos = ChaosMesh(host, process)
        chaos.settled(60.0)
        yield chaos
        process.terminate()
        assert process.wait(30) == 0
        host.assert_nothing_left()
    finally:
        host.clean()
        shutil.rmtree(host.base)


@pytest.fixture(scope="module")
def mesh() -> Iterator[ChaosMesh]:
    """Restarts are not rationed: tests/process/test_deaths.py tests the budget."""
    with started(KVMESH_SUPERVISION__RESTART_BUDGET="100000") as mesh:
        yield mesh


@pytest.fixture(scope="module")
def undisturbed(mesh: ChaosMesh) -> list[Answer]:
    """The answers that every wave has to get."""
    answers = asyncio.run(Wave(mesh.port, bodies("undisturbed")).run())
    assert not [answer.broken for answer in answers if answer.broken]
    assert len({answer.text for answer in answers}) > len(answers) // 2, "texts that are all alike prove nothing"
    return answers

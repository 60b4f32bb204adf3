"""One mesh of `tiny`, prefill and decode apart, for all tests of a file."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.chaos.chaos_mesh import UNRATIONED, ChaosMesh, started
from tests.chaos.streams import Answer, Wave, asking

MESH = ("--model", "tiny", "--pooling", "mean", "--prefill", "1", "--decode", "1", "--detokenizers", "2")


@pytest.fixture(scope="module")
def mesh() -> Iterator[ChaosMesh]:
    with started(*MESH, **UNRATIONED) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def undisturbed(mesh: ChaosMesh) -> list[Answer]:
    """The answers that every wave has to get."""
    answers = asyncio.run(Wave(mesh.port, asking("undisturbed")).run())
    assert not [answer.broken for answer in answers if answer.broken]
    assert len({answer.text for answer in answers}) > len(answers) // 2, "texts that are all alike prove nothing"
    return answers

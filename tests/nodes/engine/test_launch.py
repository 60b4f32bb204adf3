"""What starts the process of an engine, where it must not wait for ever."""

import os

import pytest

from nodes.engine.errors import StartFailed
from nodes.engine.launch import Launched
from nodes.engine.startup import StartMesh


def test_a_wish_that_no_pipe_holds_is_refused_and_leaves_nothing_open() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(StartFailed, match="topology file"):
        Launched(StartMesh(mesh="m", gateway="g0", epoch=1, settings={"model": "x" * 2_000_000}))
    assert os.listdir("/proc/self/fd") == before

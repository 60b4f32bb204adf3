"""What starts the process of an engine, where it must not wait for ever."""

import os
from pathlib import Path

import pytest

from nodes.engine.errors import StartFailed
from nodes.engine.launch import Launched, encoded
from nodes.engine.startup import StartMesh


def test_a_wish_that_no_pipe_holds_is_refused_and_leaves_nothing_open() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(StartFailed, match="topology file"):
        Launched(StartMesh(mesh="m", gateway="g0", epoch=1, settings={"model": "x" * 2_000_000}))
    assert os.listdir("/proc/self/fd") == before


def test_a_setting_that_is_no_data_is_refused_and_a_path_is_text() -> None:
    before = os.listdir("/proc/self/fd")
    for value in (object(), {1.5: [object()]}):
        with pytest.raises(StartFailed, match="setting cannot be told"):
            Launched(StartMesh(mesh="m", gateway="g0", epoch=1, settings={"model": value}))
    assert os.listdir("/proc/self/fd") == before
    wish = StartMesh(mesh="m", gateway="g0", epoch=1, settings={"model": Path("/models/x")})
    assert b'"model":"/models/x"' in encoded(wish)

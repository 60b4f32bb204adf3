"""The world of most tests here; those on devices and sockets have their own by this name."""

from collections.abc import Callable

import pytest

from tests.nodes.kv_agent.two_schedulers import run


@pytest.fixture
def world() -> Callable[..., None]:
    """Two schedulers and a registry; for tests that are coroutine functions."""
    return run

"""Keeps torch's threads from spinning while others want the cores."""

from collections.abc import Iterator
from typing import Any

import pytest

from nodes.worker.environment import prepare_environment

prepare_environment()

from tests.nodes.worker.native_builds import NAMES, library_of  # noqa: E402


@pytest.fixture(params=NAMES)
def library(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Each build of the native kernels that runs here, with one thread before and after."""
    found = library_of(request.param)
    yield found
    found.set_threads(1)

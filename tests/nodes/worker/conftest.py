"""The builds of the native kernels that run here."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.nodes.worker.native_builds import NAMES, library_of


@pytest.fixture(params=NAMES)
def library(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Each build of the native kernels that runs here, with one thread before and after."""
    found = library_of(request.param)
    yield found
    found.set_threads(1)

"""What every test leaves as it has found it."""

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """Commands, actors and simulations set the log of the whole process, levels included."""
    yield
    structlog.reset_defaults()

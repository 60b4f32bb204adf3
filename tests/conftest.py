"""What every test leaves as it has found it, and how many examples it draws."""

from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

# Here and not in a folder's conftest: what a test draws shall not depend on which folders are run with it. No deadline,
# since that tells how busy a machine is: a test of cli/ failed by it where cores were short.
settings.register_profile("kvmesh", deadline=None, max_examples=80, stateful_step_count=40)
settings.load_profile("kvmesh")


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """Commands, actors and simulations set the log of the whole process, levels included."""
    yield
    structlog.reset_defaults()

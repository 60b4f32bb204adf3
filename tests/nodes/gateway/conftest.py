"""One gateway for all that leave it as they have found it."""

import pytest


@pytest.fixture(scope="session")
def served():
    """A ring that goes well, for tests that only read from it or send what it must refuse."""
    from tests.nodes.gateway.fake_ring import ServedRing

    with ServedRing() as ring:
        yield ring

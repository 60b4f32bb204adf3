"""Gateways of one test each, and one for all that leave it as they have found it."""

import pytest


@pytest.fixture(scope="session")
def served():
    """A ring that goes well, for tests that only read from it or send what it must refuse."""
    from tests.nodes.gateway.fake_ring import ServedRing

    with ServedRing() as ring:
        yield ring


@pytest.fixture
def ring(settings):
    """Runs a test that is a coroutine function on a ring of its own."""
    from tests.nodes.gateway.fake_ring import play

    return lambda test: play(test, **settings)


@pytest.fixture
def client():
    """What `ring` opens besides, and so gives in the place of this."""

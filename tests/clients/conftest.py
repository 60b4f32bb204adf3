"""One gateway for all client libraries."""

import pytest


@pytest.fixture(scope="session")
def served():
    """A real gateway on a real port, with a ring of bytes behind it."""
    from tests.nodes.gateway.fake_ring import ServedRing

    with ServedRing() as ring:
        yield ring

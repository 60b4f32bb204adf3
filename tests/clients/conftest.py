"""Makes the gateway's `fake_ring` importable here."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "nodes" / "gateway"))


@pytest.fixture(scope="session")
def served():
    """A real gateway on a real port, with a ring of bytes behind it."""
    from fake_ring import ServedRing

    with ServedRing() as ring:
        yield ring

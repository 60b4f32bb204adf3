"""Makes `fake_ring` importable beside the tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def served():
    """A ring that goes well, for tests that only read from it or send what it must refuse."""
    from fake_ring import ServedRing

    with ServedRing() as ring:
        yield ring

"""Where page tables are, and pages of host memory: in files, or in this process."""

from pathlib import Path

import pytest

from kvstore.pool.page_pool import HeapHost, MemoryHost, ShmHost


@pytest.fixture(params=["shm", "heap"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> MemoryHost:
    return ShmHost(tmp_path) if request.param == "shm" else HeapHost()


@pytest.fixture
def tables(host: MemoryHost) -> MemoryHost:
    """As tests call it whose pages are on a device: there it has page tables only."""
    return host

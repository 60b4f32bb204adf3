"""Where page tables are, and pages of host memory: in files, or in this process."""

from pathlib import Path

import pytest

from kvstore.pool.page_pool import HeapHost, MemoryHost, ShmHost


@pytest.fixture(params=["shm", "heap"])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> MemoryHost:
    return ShmHost(tmp_path) if request.param == "shm" else HeapHost()

"""One rank's half of a communicator over a stand-in for CuPy's NCCL: what it calls, and what ends a call that hangs."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nodes.worker.config import WorkerConfig
from nodes.worker.cuda import nccl_collectives
from nodes.worker.cuda.nccl_collectives import NcclCollectives, NcclCollectivesMaker
from nodes.worker.errors import BackendMissing, CollectiveFailed, GroupNotFormed
from nodes.worker.parallel.collectives import Collectives
from nodes.worker.parallel.group import collectives_maker
from nodes.worker.parallel.shm_collectives import ShmCollectivesMaker
from tests.nodes.worker.cuda.rank_running import FakeNccl

SOON_S = 10.0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    found = FakeNccl()
    monkeypatch.setattr(nccl_collectives, "_nccl", lambda: found)
    monkeypatch.setattr(nccl_collectives, "_set_device", lambda device: None)
    monkeypatch.setattr(nccl_collectives, "_stream", lambda device: 5)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    return found


def connected(size: int = 2) -> list[NcclCollectives]:
    maker = NcclCollectivesMaker(SOON_S)
    unique_id = maker.unique_id()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: maker.connect(unique_id, rank, size, f"cuda:{rank}"), range(size)))


def at_both(groups: list[NcclCollectives], work) -> list[torch.Tensor]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, groups))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_gatherings(library: FakeNccl, dtype: torch.dtype) -> None:
    groups = connected(3)

    def x(group: Collectives) -> torch.Tensor:
        return torch.arange(6, dtype=dtype).view(2, 3) + 10 * group.rank

    for total in at_both(groups, lambda group: group.all_reduce(x(group))):
        assert torch.equal(total, torch.tensor([[30, 33, 36], [39, 42, 45]], dtype=dtype))
    for parts in at_both(groups, lambda group: group.all_gather(x(group))):
        assert torch.equal(parts, torch.cat([x(group) for group in groups], 1))
    assert library.calls[2] == [("allReduce", 6, 5), ("allGather", 6, 5)]
    for group in groups:
        group.check()


def test_a_sum_is_in_place_and_of_strided_rows_too(library: FakeNccl) -> None:
    [group] = connected(1)
    x = torch.ones(2, 3)
    assert group.all_reduce(x).data_ptr() == x.data_ptr()
    strided = torch.arange(6.0).view(3, 2).t()
    assert torch.equal(group.all_gather(strided), strided)
    assert group.all_gather(torch.empty(0, 7)).shape == (0, 7)
    assert [name for name, _, _ in library.calls[0]] == ["allReduce", "allGather"], "nothing is called for nothing"


def why(group: NcclCollectives) -> str:
    with pytest.raises(CollectiveFailed) as caught:
        group.all_reduce(torch.ones(2))
    return str(caught.value)


def test_an_abort_ends_what_hangs_and_everything_after(library: FakeNccl) -> None:
    first, _ = connected()
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(why, first)
        while library.calls[0] != [("allReduce", 2, 5)]:
            assert not hanging.done()
        first.abort()
        assert hanging.result(SOON_S) == "the group was aborted"
    first.abort()
    first.close()
    with pytest.raises(CollectiveFailed, match="aborted"):
        first.check()
    assert why(first) == "the group was aborted"
    assert library.calls[0] == [("allReduce", 2, 5)], "nothing is called on what was aborted"
    assert library.aborted == [0], "aborted twice"


def test_what_nccl_finds_out_later_fails_the_check(library: FakeNccl) -> None:
    first, _ = connected()
    first.check()
    library.async_error = "NCCL_ERROR_REMOTE_ERROR: remote process exited"
    with pytest.raises(CollectiveFailed, match="remote process exited"):
        first.check()
    library.async_error = ""
    with pytest.raises(CollectiveFailed, match="remote process exited"):
        first.check()


def test_ranks_that_do_not_come(library: FakeNccl) -> None:
    maker = NcclCollectivesMaker(0.1)
    with pytest.raises(GroupNotFormed, match=r"rank 0 of 2 did not find the others within 0\.1 s") as caught:
        maker.connect(maker.unique_id(), 0, 2, "cuda:0")
    assert caught.value.retryable
    for thread in threading.enumerate():
        if thread.name.startswith("nccl"):
            thread.join(SOON_S)
    assert library.aborted == [0], "what hangs in initialising is ended"


def test_a_device_that_nccl_refuses(library: FakeNccl) -> None:
    library.is_aborted = True
    with pytest.raises(GroupNotFormed, match=r"rank 1 of 2 on cuda:1 could not join \(NCCL_ERROR_INTERNAL_ERROR"):
        NcclCollectivesMaker(SOON_S).connect(bytes(128), 1, 2, "cuda:1")


def test_where_there_is_no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(nccl_collectives.importlib, "import_module", missing)
    with pytest.raises(BackendMissing, match="kvmesh\\[cuda13\\]"):
        NcclCollectivesMaker(1.0).unique_id()
    monkeypatch.setattr(
        nccl_collectives.importlib, "import_module", lambda name: type("Module", (), {"available": False})
    )
    with pytest.raises(BackendMissing, match="finds no NCCL"):
        NcclCollectivesMaker(1.0).connect(bytes(128), 0, 2, "cuda:0")


def test_which_connects_what() -> None:
    config = WorkerConfig(group="g", model="m", agent="a")
    assert isinstance(collectives_maker(config), ShmCollectivesMaker)
    on_device = WorkerConfig(group="g", model="m", agent="a", device="cuda:1")
    assert isinstance(collectives_maker(on_device), NcclCollectivesMaker)

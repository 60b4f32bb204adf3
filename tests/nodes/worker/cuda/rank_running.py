"""Groups of ranks for tests: each in a thread of this process, or in a forked process of its own."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from kvstore.pool.page_pool import HeapHost, PoolInfo
from nodes.model_spec import ModelSpec, resolve_model
from nodes.request import Sampling
from nodes.worker.config import WorkerConfig
from nodes.worker.cuda.load import build_runner
from nodes.worker.ops.torch.runner import DeviceRunner
from nodes.worker.parallel.collectives import Collectives
from nodes.worker.parallel.shm_collectives import ShmCollectivesMaker
from nodes.worker.pool.view import PoolView
from tests.nodes.worker.torch_running import GREEDY, Row, step

IDS = torch.randint(0, 300, (150,), generator=torch.Generator().manual_seed(1)).tolist()
PAGES = list(range(20, 30))
SAMPLED = Sampling(temperature=1.5, seed=9, top_p=0.95)
MODEL = "random:tiny-qwen3"


def in_ranks(
    size: int, work: Callable[[Collectives], Any], maker: Any = None, device: str = "cpu", limit_s: float = 60.0
) -> list[Any]:
    """What `work` returns at each rank, each in a thread; raises what the first rank raised that was not let down."""
    maker = maker or ShmCollectivesMaker(20.0, 20.0)
    unique_id = maker.unique_id()

    def of_rank(rank: int) -> Any:
        # Threads of torch are a thread's own setting, and two cores are few for four ranks.
        torch.set_num_threads(1)
        group = maker.connect(unique_id, rank, size, device)
        try:
            return work(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size, thread_name_prefix="rank") as pool:
        return [future.result(limit_s) for future in [pool.submit(of_rank, rank) for rank in range(size)]]


def rank_runner(
    model: str | Path | ModelSpec,
    group: Collectives | None,
    dtype: str = "auto",
    *,
    num_pages: int = 60,
    **options: Any,
) -> DeviceRunner:
    """The runner of one rank over a pool of its own, in the host's memory."""
    spec = model if isinstance(model, ModelSpec) else resolve_model(str(model))
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    layout = spec.kv_layout(dtype, 16, rank, size)
    pool = HeapHost().create("g", PoolInfo(group="g", num_pages=num_pages, layout=layout, incarnation=1))
    view = PoolView(pool.pages_view, layout)
    view.pages.fill_(torch.nan)
    config = WorkerConfig(group="g", model=spec.name, agent="a", dtype=dtype, **options)
    return build_runner(spec, config, view, group)[0]


def decoded(runner: DeviceRunner, num_steps: int = 12) -> list[list[int]]:
    """Tokens of two sequences, one drawn and one greedy, prompts and then steps of single rows, one ahead."""
    prompts, pages = [IDS[:40], IDS[40:60]], [PAGES[:5], PAGES[5:]]
    runner.run(step(Row(0, prompts[0][:16], pages[0], None, prompt=40)))
    rows = [Row(0, prompts[i], pages[i], (SAMPLED, GREEDY)[i], prompt=len(prompts[i])) for i in (0, 1)]
    tokens = [list(runner.run(step(*rows)).token_ids)]
    for number in range(num_steps):
        rows = [
            Row(len(prompts[i]) + number, [tokens[-1][i]], pages[i], (SAMPLED, GREEDY)[i], prompt=len(prompts[i]))
            for i in (0, 1)
        ]
        tokens.append(list(runner.run(step(*rows)).token_ids))
    return tokens


class FakeNccl:
    """`cupy.cuda.nccl` over the host's memory, ranks in threads: operations are done when all ranks have called them.

    `calls` has each rank's operations in their order. A rank that waits in vain hangs until its abort. Collectives
    alone: what one half of a pair sends and receives is recorded by `tests/kvstore/transfer/paired/test_nccl.py`, which
    has no other half, and processes meet in files by `tests/software_device`.
    """

    available = True

    def __init__(self) -> None:
        self.calls: dict[int, list[tuple[str, int, int]]] = {}
        self.aborted: list[int] = []
        self.async_error = ""
        self.size = 0
        self.num_arrived = 0
        self.is_aborted = False
        self.changed = threading.Condition()
        self.addresses: dict[int, tuple[int, int]] = {}
        library = self

        class NcclCommunicator:
            def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
                assert len(commId) == 128
                self.rank, self.size = rank, ndev
                library.calls[rank] = []
                library.size = ndev
                library.wait("init")

            def allReduce(self, send: int, receive: int, count: int, datatype: int, op: int, stream: int) -> None:
                assert op == 0
                library.exchange(self.rank, "allReduce", send, receive, count, datatype, stream, self._sum)

            def allGather(self, send: int, receive: int, count: int, datatype: int, stream: int) -> None:
                library.exchange(self.rank, "allGather", send, receive, count, datatype, stream, torch.cat)

            def check_async_error(self) -> None:
                if library.async_error:
                    raise RuntimeError(library.async_error)

            def abort(self) -> None:
                library.aborted.append(getattr(self, "rank", -1))
                with library.changed:
                    library.is_aborted = True
                    library.changed.notify_all()

            @staticmethod
            def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
                return torch.stack(parts).float().sum(0).to(parts[0].dtype)

        self.NcclCommunicator = NcclCommunicator

    def get_unique_id(self) -> bytes:
        return bytes(128)

    def wait(self, what: str) -> None:
        with self.changed:
            self.num_arrived += 1
            target = -(-self.num_arrived // self.size) * self.size
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.num_arrived >= target or self.is_aborted, 20)
            if self.num_arrived < target:
                raise RuntimeError(f"NCCL_ERROR_INTERNAL_ERROR: {what}")

    def exchange(self, rank: int, what: str, send: int, receive: int, count: int, datatype: int, stream: int,
                 combine: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:  # fmt: skip
        self.calls[rank].append((what, count, stream))
        self.addresses[rank] = (send, count)
        self.wait(what)
        assert len({size for _, size in self.addresses.values()}) == 1, "ranks call with different sizes"
        found = combine([_at(address, size, datatype).clone() for _, (address, size) in sorted(self.addresses.items())])
        # Nobody writes before all have read.
        self.wait(what)
        _at(receive, found.numel(), datatype).copy_(found)
        self.wait(what)


def _at(address: int, count: int, datatype: int) -> torch.Tensor:
    import ctypes

    dtype = {7: torch.float32, 9: torch.bfloat16}[datatype]
    size = count * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)

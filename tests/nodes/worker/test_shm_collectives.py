"""Ranks of one host: sums and gatherings of any size, and that nobody waits for ever for a rank that does not come."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.worker.errors import CollectiveFailed, GroupNotFormed
from nodes.worker.parallel import shm_collectives
from nodes.worker.parallel.collectives import Collectives
from nodes.worker.parallel.shm_collectives import SLOT_BYTES, ShmCollectivesMaker
from tests.nodes.worker.cuda.rank_running import MODEL, decoded, in_ranks, rank_runner

PROCESS = Path(__file__).parent / "rank_process.py"
SOON_S = 10.0


def of_rank(rank: int, rows: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rows, width, generator=generator).to(dtype)


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["sum", "gather"]), st.integers(0, 5), st.integers(1, 700),
              st.sampled_from([torch.float32, torch.bfloat16])),
    min_size=1, max_size=6,
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), OPERATIONS)
def test_any_operations_of_any_sizes(size, operations) -> None:
    def work(group: Collectives) -> list[torch.Tensor]:
        found = []
        for kind, rows, width, dtype in operations:
            x = of_rank(group.rank, rows, width, dtype)
            found.append(group.all_reduce(x) if kind == "sum" else group.all_gather(x))
        return found

    results = in_ranks(size, work)
    for index, (kind, rows, width, dtype) in enumerate(operations):
        parts = [of_rank(rank, rows, width, dtype) for rank in range(size)]
        if kind == "gather":
            expected = torch.cat(parts, 1)
        else:
            expected = parts[0].float()
            for part in parts[1:]:
                expected = expected + part.float()
        for found in results:
            assert torch.equal(found[index], expected.to(dtype))


@pytest.mark.parametrize("elements", [SLOT_BYTES // 4 - 1, SLOT_BYTES // 4, SLOT_BYTES // 4 + 1, SLOT_BYTES])
def test_more_than_fits_into_a_slot(elements: int) -> None:
    def work(group: Collectives) -> tuple[torch.Tensor, torch.Tensor]:
        x = of_rank(group.rank, 1, elements)
        return group.all_reduce(x.clone()), group.all_gather(x.view(-1, 1))

    expected = [of_rank(rank, 1, elements) for rank in (0, 1)]
    for total, gathered in in_ranks(2, work):
        assert torch.equal(total, expected[0] + expected[1])
        assert torch.equal(gathered, torch.stack([part[0] for part in expected], 1))


def test_rows_that_are_not_contiguous() -> None:
    def work(group: Collectives) -> tuple[torch.Tensor, torch.Tensor]:
        x = of_rank(group.rank, 8, 6).t()[::2]
        return group.all_reduce(x), group.all_gather(x)

    parts = [of_rank(rank, 8, 6).t()[::2] for rank in (0, 1)]
    for total, gathered in in_ranks(2, work):
        assert torch.equal(total, parts[0] + parts[1])
        assert torch.equal(gathered, torch.cat(parts, 1))


@contextmanager
def pair(wait_timeout_s: float = 60.0) -> Iterator[tuple[Collectives, Collectives]]:
    maker = ShmCollectivesMaker(SOON_S, wait_timeout_s)
    unique_id = maker.unique_id()
    with ThreadPoolExecutor(2) as pool:
        first, second = [pool.submit(maker.connect, unique_id, rank, 2, "cpu") for rank in (0, 1)]
        groups = first.result(SOON_S), second.result(SOON_S)
    try:
        yield groups
    finally:
        for group in groups:
            group.close()


def why(group: Collectives, shape: tuple[int, int] = (2, 2)) -> str:
    with pytest.raises(CollectiveFailed) as caught:
        group.all_reduce(torch.ones(shape))
    return str(caught.value)


def test_an_abort_reaches_a_call_that_hangs_and_the_other_rank() -> None:
    with pair() as (first, second), ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(why, first)
        begun = threading.Event()
        pool_of_abort = threading.Timer(0.05, lambda: (begun.set(), first.abort()))
        pool_of_abort.start()
        assert hanging.result(SOON_S) == "the group was aborted"
        assert begun.is_set(), "it did not hang"
        assert why(second) == "rank 0 is gone"
        for group in (first, second):
            with pytest.raises(CollectiveFailed):
                group.check()
            group.abort()
            assert why(group)


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever() -> None:
    with pair(wait_timeout_s=0.1) as (first, second):
        first.check()
        assert why(first) == "ranks [1] did not arrive within 0.1 s"
        assert why(second) == "rank 0 is gone"


def test_ranks_that_compute_different_things_notice() -> None:
    with pair() as (first, second), ThreadPoolExecutor(2) as pool:
        found = [pool.submit(why, first, (2, 2)), pool.submit(why, second, (2, 3))]
        reasons = [future.result(SOON_S) for future in found]
    assert any("computes something else: (0, 1, 24) there, (0, 1, 16) here" in reason for reason in reasons) or any(
        "computes something else: (0, 1, 16) there, (0, 1, 24) here" in reason for reason in reasons
    )


def test_a_closed_rank_is_gone() -> None:
    with pair() as (first, second):
        second.close()
        assert why(first) == "rank 1 is gone"
        assert why(second) == "the group was closed"


def test_a_group_that_is_not_complete_is_not_formed() -> None:
    maker = ShmCollectivesMaker(0.1)
    unique_id = maker.unique_id()
    with pytest.raises(GroupNotFormed, match=r"rank 0 of 2 did not find the others within 0\.1 s") as caught:
        maker.connect(unique_id, 0, 2, "cpu")
    assert caught.value.code == "group_not_formed"
    assert caught.value.retryable
    # Rank 0 has given up, and says so by not being there.
    begin = time.monotonic()
    with pytest.raises(GroupNotFormed, match="ConnectionRefusedError"):
        ShmCollectivesMaker(60.0).connect(unique_id, 1, 2, "cpu")
    assert time.monotonic() - begin < SOON_S


def test_rank_0_that_never_connects() -> None:
    maker = ShmCollectivesMaker(0.1)
    unique_id = maker.unique_id()
    with pytest.raises(GroupNotFormed, match="rank 1 of 2 did not find the others"):
        maker.connect(unique_id, 1, 2, "cpu")
    maker.close()
    with pytest.raises(GroupNotFormed, match="ConnectionRefusedError"):
        maker.connect(unique_id, 1, 2, "cpu")


def test_a_unique_id_of_another_process() -> None:
    with pytest.raises(GroupNotFormed, match="not made in its process"):
        ShmCollectivesMaker(1.0).connect(bytes(16), 0, 2, "cpu")


@pytest.mark.parametrize(
    ("joining", "message"),
    [([(1, 3)], "rank 1 of 3 wants to join a group of 2"), ([(0, 2)], "did not find"), ([(2, 2)], "rank 2 of 2 wants")],
)
def test_ranks_that_were_told_different_things(joining, message) -> None:
    maker = ShmCollectivesMaker(0.5)
    unique_id = maker.unique_id()
    with ThreadPoolExecutor(3) as pool:
        hub = pool.submit(maker.connect, unique_id, 0, 2, "cpu")
        others = [pool.submit(ShmCollectivesMaker(0.5).connect, unique_id, rank, size, "cpu") for rank, size in joining]
        for future in others:
            assert isinstance(future.exception(SOON_S), GroupNotFormed)
        assert message in str(hub.exception(SOON_S))


def test_two_workers_of_one_rank() -> None:
    maker = ShmCollectivesMaker(5.0)
    unique_id = maker.unique_id()
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(maker.connect, unique_id, rank, 3, "cpu") for rank in (0, 1, 1)]
        reasons = [str(future.exception(SOON_S)) for future in futures]
    assert reasons[0] == "two workers claim to be rank 1"
    assert all("rank 0 has ended" in reason or "did not find" in reason for reason in reasons[1:])


def test_who_hangs_up_while_joining() -> None:
    maker = ShmCollectivesMaker(5.0)
    unique_id = maker.unique_id()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(shm_collectives._address(unique_id))
    with pytest.raises(GroupNotFormed, match="a rank ended while it joined"):
        maker.connect(unique_id, 0, 2, "cpu")


def test_other_users_are_neither_let_in_nor_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    maker = ShmCollectivesMaker(0.3)
    unique_id = maker.unique_id()
    uid = os.getuid()
    monkeypatch.setattr(shm_collectives.os, "getuid", lambda: uid + 1)
    with pytest.raises(GroupNotFormed, match="another user's process listens"):
        maker.connect(unique_id, 1, 2, "cpu")
    with pytest.raises(GroupNotFormed, match="did not find the others"):
        maker.connect(unique_id, 0, 2, "cpu")


def test_ranks_on_a_device_are_connected_otherwise() -> None:
    with pytest.raises(GroupNotFormed, match="ranks on cuda:0"):
        ShmCollectivesMaker(1.0).connect(bytes(16), 0, 2, "cuda:0")


def test_nothing_is_left_behind() -> None:
    in_ranks(3, lambda group: group.all_reduce(torch.ones(2, 2)))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        in_ranks(3, lambda group: group.all_reduce(torch.ones(2, 2)))
    assert len(os.listdir("/proc/self/fd")) <= before
    maker = ShmCollectivesMaker(SOON_S)
    unique_id = maker.unique_id()
    assert unique_id.hex() in Path("/proc/net/unix").read_text()
    maker.connect(unique_id, 0, 1, "cpu").close()
    assert unique_id.hex() not in Path("/proc/net/unix").read_text()


def sum_for_ever(group: Collectives) -> None:
    for number in range(10_000_000):
        group.all_reduce(torch.full((4, 4), float(number)))


def start(what: str, unique_id: bytes, rank: int, size: int) -> "subprocess.Popen[str]":
    arguments = [sys.executable, str(PROCESS), what, unique_id.hex(), str(rank), str(size)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


@pytest.mark.process
def test_the_death_of_a_process_is_known_to_all_others_at_once() -> None:
    maker = ShmCollectivesMaker(60.0)
    unique_id = maker.unique_id()
    processes = [start("sums", unique_id, rank, 3) for rank in (1, 2)]
    try:
        group = maker.connect(unique_id, 0, 3, "cpu")
        killer = threading.Thread(target=lambda: (processes[1].stdout.readline(), processes[1].kill()))
        killer.start()
        with pytest.raises(CollectiveFailed) as caught:
            sum_for_ever(group)
        assert str(caught.value) in ("rank 2 is gone", "rank 1 is gone"), "the other survivor may have left first"
        killer.join(SOON_S)
        output, _ = processes[0].communicate(timeout=SOON_S)
        assert processes[0].returncode == 3
        assert output.splitlines()[-1] in ("rank 2 is gone", "rank 0 is gone")
        group.close()
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.process
def test_two_processes_compute_what_one_does() -> None:
    expected = decoded(rank_runner(MODEL, None), 4)
    maker = ShmCollectivesMaker(60.0)
    unique_id = maker.unique_id()
    other = start("decode", unique_id, 1, 2)
    try:
        group = maker.connect(unique_id, 0, 2, "cpu")
        assert decoded(rank_runner(MODEL, group), 4) == expected
        output, _ = other.communicate(timeout=60)
        assert output.splitlines()[-1] == str(expected)
        group.close()
    finally:
        other.kill()
        other.communicate()

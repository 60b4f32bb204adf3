"""Two ranks of NCCL on one device, each a process of its own, with an NCCL that allows it: 2.30 or newer.

Where CuPy finds an older one, as torch brings it, `python3 -m tools.build_nccl SOURCE` builds one and says how to name
it to these tests (`KVMESH_NCCL_LIBRARY`); loaded before CuPy's it is the one that CuPy calls. Assumed is that two ranks
on a device are served as two on two devices are.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.gpu_pool import Child, digest, random_bytes

LIBRARY = os.environ.get("KVMESH_NCCL_LIBRARY", "")


def refusal() -> str:
    """Why there cannot be two ranks on a device; empty if there can."""
    if LIBRARY:
        return ""
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        return f"CuPy's NCCL cannot be imported: {error}"
    version = nccl.get_version()
    if version >= 23000:
        return ""
    return f"NCCL {version} takes one rank on a device and KVMESH_NCCL_LIBRARY is not set: see tools/build_nccl.py"


REFUSAL = refusal()

pytestmark = [pytest.mark.process, pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)]

SIZE = 4 << 20


def rank_process(log: Path) -> Child:
    variables = {
        **({"LD_PRELOAD": LIBRARY} if LIBRARY else {}),
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        # What `tools/build_nccl.py` leaves out must not be chosen.
        "NCCL_ALGO": "Ring",
        "NCCL_MAX_CTAS": "8",
        "NCCL_DEBUG": "WARN",
        "NCCL_DEBUG_FILE": f"{log}/nccl.%p",
    }
    return Child("nccl_process.py", **variables)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Child]]:
    ranks = [rank_process(tmp_path) for _ in range(2)]
    unique_id = ranks[0].ask("id")
    for number, rank in enumerate(ranks):
        rank.tell("link", unique_id, number)
    found = [rank.answer() for rank in ranks]
    logs = "".join(path.read_text() for path in tmp_path.glob("nccl.*"))
    assert found == ["ready", "ready"], f"{found} {logs}"
    yield ranks
    for rank in ranks:
        rank.kill()


def test_bytes_cross_in_groups_to_where_they_belong(ranks: list[Child]) -> None:
    receiver, sender = ranks
    receiver.ask("fill", 1)
    sender.ask("fill", 2)
    expected, source = bytearray(random_bytes(1, SIZE)), random_bytes(2, SIZE)
    sizes = [1 << 20, 17, 65536, 1]
    targets, sources = [100, 2 << 20, 3 << 20, SIZE - 1], [1 << 20, 5, 0, 77]
    for number in (1, 2):
        for rank, offsets in ((receiver, targets), (sender, sources)):
            parts = [f"{offset}:{size}" for offset, size in zip(offsets, sizes, strict=True)]
            assert rank.ask("move", number, *parts) == "begun"
        assert [rank.ask("moved") for rank in ranks] == [str(number)] * 2
    for target, origin, size in zip(targets, sources, sizes, strict=True):
        expected[target : target + size] = source[origin : origin + size]
    assert receiver.ask("hash") == digest(expected)
    assert [rank.ask("end") for rank in ranks] == ["ended", "ended"]


def test_a_receive_that_nobody_serves_is_aborted_and_the_device_lives_on(ranks: list[Child]) -> None:
    receiver, sender = ranks
    receiver.ask("move", 1, f"0:{SIZE}")
    print(f"aborting a receive took {receiver.ask('abort')} s")
    assert sender.ask("fill", 3) == sender.ask("hash")
    print(f"aborting the other end took {sender.ask('abort')} s")


def test_an_end_that_is_killed_leaves_one_that_can_be_aborted(ranks: list[Child]) -> None:
    receiver, sender = ranks
    receiver.ask("move", 1, f"0:{SIZE}")
    sender.process.kill()
    sender.process.wait(30)
    said = receiver.ask("abort")
    print(f"aborting after the other end was killed took {said} s")
    assert float(said) < 30
    assert receiver.ask("fill", 3) == receiver.ask("hash")


@pytest.mark.parametrize("count", [1, 1024, 1 << 20])
def test_sums_and_gathers_of_tensor_parallelism(ranks: list[Child], count: int) -> None:
    for rank in ranks:
        rank.tell("sum", count)
    assert [rank.answer() for rank in ranks] == ["3 3", "3 3"]
    for number, rank in enumerate(ranks):
        rank.ask("fill", number)
    for rank in ranks:
        rank.tell("gather", count)
    expected = digest(random_bytes(0, SIZE)[:count] + random_bytes(1, SIZE)[:count])
    assert [rank.answer() for rank in ranks] == [expected] * 2

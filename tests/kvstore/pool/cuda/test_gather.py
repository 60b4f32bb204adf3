"""The kernel that copies scattered pages: its table, and its source run as C++ on the host and compiled for a GPU."""

import ctypes
import random
import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.pool.cuda.gather import (
    MAX_BLOCKS,
    MAX_RANGES,
    MAX_TABLE_BYTES,
    NUM_THREADS,
    OPTIONS,
    PIECE_BYTES,
    SOURCE,
    table_of,
)

RANGES = st.lists(
    st.tuples(st.integers(1, 1 << 48), st.integers(1, 1 << 48), st.integers(1, 10 * PIECE_BYTES)),
    min_size=1,
    max_size=50,
)

SHIM = """
#include <cstdint>
#include <cstring>
#define __device__
#define __global__
struct uint4 { uint32_t x, y, z, w; };
static uint4 __ldcs(const uint4 *at) { return *at; }
static void __stcs(uint4 *at, uint4 x) { *at = x; }
struct Index { unsigned int x; };
static Index threadIdx, blockIdx, blockDim, gridDim;
"""

LAUNCH = """
extern "C" void launch(const word *table, word num_ranges, word num_pieces, unsigned blocks, unsigned threads)
{
    gridDim.x = blocks, blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            kvmesh_gather(table, num_ranges, num_pieces);
}
"""

Launch = Callable[[bytes, int, int, int, int], None]


@given(RANGES)
def test_the_table_names_every_copy_and_counts_its_pieces(ranges: list[tuple[int, int, int]]) -> None:
    table = table_of(ranges)
    count = len(ranges)
    words = struct.unpack(f"<{4 * count + 1}Q", table.data)
    assert list(zip(words[:count], words[count : 2 * count], words[2 * count : 3 * count], strict=True)) == ranges
    first = words[3 * count :]
    assert (first[0], first[-1]) == (0, table.num_pieces)
    for (_, _, size), begin, end in zip(ranges, first, first[1:], strict=False):
        assert (end - begin - 1) * PIECE_BYTES < size <= (end - begin) * PIECE_BYTES
    assert 1 <= table.num_blocks <= MAX_BLOCKS


def test_the_largest_table_fits() -> None:
    assert len(table_of([(1, 2, 3)] * MAX_RANGES).data) == MAX_TABLE_BYTES


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """The kernel, its threads one after another: none of them waits for another."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    folder = tmp_path_factory.mktemp("kernel")
    source, library = folder / "gather.cpp", folder / "gather.so"
    source.write_text(SHIM + SOURCE + LAUNCH)
    words = ["g++", "-O1", "-fsanitize=undefined", "-fno-sanitize-recover", "-shared", "-fPIC", *OPTIONS]
    subprocess.run([*words, "-o", str(library), str(source)], check=True)
    function = ctypes.CDLL(str(library)).launch
    function.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint, ctypes.c_uint]
    return function


AREA_BYTES = 12 * PIECE_BYTES


class Area:
    """Memory with an address, aligned to 16 bytes as an allocation of a device is."""

    def __init__(self, data: bytes) -> None:
        self._memory = ctypes.create_string_buffer(len(data) + 16)
        self.pointer = -(-ctypes.addressof(self._memory) // 16) * 16
        self.size = len(data)
        ctypes.memmove(self.pointer, data, len(data))

    def bytes(self) -> bytes:
        return ctypes.string_at(self.pointer, self.size)


@pytest.mark.parametrize("seed", range(20))
def test_the_kernel_copies_what_it_is_told_and_nothing_else(launch: Launch, seed: int) -> None:
    source = random.Random(seed)
    origin, target = Area(source.randbytes(AREA_BYTES)), Area(bytes(AREA_BYTES))
    ranges: list[tuple[int, int, int]] = []
    expected = bytearray(AREA_BYTES)
    free = 0
    while free < AREA_BYTES - 10:
        # Pages of whole 16 bytes, odd ends, odd beginnings, and those whose two ends do not fit each other.
        step = source.choice([16, 4, 1])
        size = max(
            1, min(source.choice([7, 100, 5000, PIECE_BYTES, 3 * PIECE_BYTES]) // step * step, AREA_BYTES - free)
        )
        start = source.randrange(0, AREA_BYTES - size + 1) // step * step
        ranges.append((target.pointer + free, origin.pointer + start, size))
        expected[free : free + size] = origin.bytes()[start : start + size]
        free += size + source.choice([0, 16, 3])
    source.shuffle(ranges)
    table = table_of(ranges)
    for blocks in (1, table.num_blocks):
        ctypes.memset(target.pointer, 0, AREA_BYTES)
        launch(table.data, table.num_ranges, table.num_pieces, blocks, 32)
        assert target.bytes() == bytes(expected)


def compiled(folder: Path, *options: str) -> tuple[Path, str]:
    """What nvcc makes of the source, and what it says."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc here")
    source, target = folder / "gather.cu", folder / "gather"
    source.write_text(SOURCE)
    words = ["nvcc", "-arch=sm_90a", *options, *OPTIONS, "-o", str(target), str(source)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target, done.stderr


def test_it_compiles_for_the_gpu_as_it_is_launched(tmp_path: Path) -> None:
    _, said = compiled(tmp_path, "-cubin", "-Xptxas", "-v")
    assert "0 bytes spill stores" in said
    registers = int(said.split("Used ")[1].split()[0])
    assert registers * NUM_THREADS <= 65536 // 4, "four blocks fit a multiprocessor at least"


def test_loads_and_stores_of_sixteen_bytes(tmp_path: Path) -> None:
    text = compiled(tmp_path, "-ptx")[0].read_text()
    assert len(re.findall(r"\bld\.(global\.)?(cs\.)?v4", text)) >= 4
    assert len(re.findall(r"\bst\.(global\.)?(cs\.)?v4", text)) >= 4

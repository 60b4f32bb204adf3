"""Many copies on one device by one kernel: its source, and the table that tells it what to copy.

A separate copy for each page costs the host 3 to 5 microseconds, as long as the device takes for several MiB; one
launch costs that once. Copies are cut into pieces; a block of threads finds its piece's copy by bisection and moves 16
bytes per thread and load, four in flight, where both addresses allow it, past the caches, as nothing is read twice:
pieces of 16 KiB then took 28 us in place of 34 on an H200, and pages of 2 MiB go at 0.88 of a plain copy's speed. The
table for `n` copies, in words of 8 bytes:

    destinations[n]  sources[n]  sizes[n]  first[n + 1]: number of each copy's first piece, then of all pieces

Used by `memory.py`, which passes in its CuPy module. The kernel's source is tested as C++ on the host, and compiled for
sm_90a.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

# Two rounds of 256 threads with four loads of 16 bytes each: smaller ones cost a bisection more often, larger ones
# leave blocks without work at the end.
PIECE_BYTES: Final = 32 << 10
# Eight such blocks fill a multiprocessor's 2,048 threads.
NUM_THREADS: Final = 256
# Twice the eight blocks that each of the 132 multiprocessors of an H100 or H200 holds: the second half begins where the
# first ends. A block takes piece after piece.
MAX_BLOCKS: Final = 2112
# A table of 64 KiB, in page-locked memory of which each stream has a few.
MAX_RANGES: Final = 2048
# The table of the docstring above, in words of 8 bytes.
MAX_TABLE_BYTES: Final = 8 * (4 * MAX_RANGES + 1)
NAME: Final = "kvmesh_gather"

SOURCE: Final = """
typedef unsigned long long word;

static __device__ void copy_piece(unsigned char *to, const unsigned char *from, word count)
{
    const word lane = threadIdx.x, step = blockDim.x;
    word head = count;
    if ((((word)to ^ (word)from) & 15) == 0) {
        head = (16 - ((word)to & 15)) & 15;
        if (head > count)
            head = count;
        const word vectors = (count - head) / 16;
        uint4 *wide_to = (uint4 *)(to + head);
        const uint4 *wide_from = (const uint4 *)(from + head);
        word i = lane;
        for (; i + 3 * step < vectors; i += 4 * step) {
            const uint4 a = __ldcs(wide_from + i), b = __ldcs(wide_from + i + step);
            const uint4 c = __ldcs(wide_from + i + 2 * step), d = __ldcs(wide_from + i + 3 * step);
            __stcs(wide_to + i, a);
            __stcs(wide_to + i + step, b);
            __stcs(wide_to + i + 2 * step, c);
            __stcs(wide_to + i + 3 * step, d);
        }
        for (; i < vectors; i += step)
            wide_to[i] = wide_from[i];
        for (word j = head + vectors * 16 + lane; j < count; j += step)
            to[j] = from[j];
    }
    for (word j = lane; j < head; j += step)
        to[j] = from[j];
}

extern "C" __global__ void kvmesh_gather(const word *table, word num_ranges, word num_pieces)
{
    const word *destinations = table, *sources = table + num_ranges;
    const word *sizes = table + 2 * num_ranges, *first = table + 3 * num_ranges;
    for (word piece = blockIdx.x; piece < num_pieces; piece += gridDim.x) {
        word low = 0, high = num_ranges;
        while (high - low > 1) {
            const word middle = (low + high) / 2;
            if (first[middle] <= piece)
                low = middle;
            else
                high = middle;
        }
        const word begin = (piece - first[low]) * PIECE_BYTES;
        const word rest = sizes[low] - begin;
        copy_piece((unsigned char *)destinations[low] + begin, (const unsigned char *)sources[low] + begin,
                   rest < PIECE_BYTES ? rest : PIECE_BYTES);
    }
}
"""

OPTIONS: Final = ("--std=c++17", f"-DPIECE_BYTES={PIECE_BYTES}ull")


class Table(NamedTuple):
    """What a launch needs; `data` is what the kernel reads."""

    data: bytes
    num_ranges: int
    num_pieces: int

    @property
    def num_blocks(self) -> int:
        return min(self.num_pieces, MAX_BLOCKS)


def table_of(ranges: Sequence[tuple[int, int, int]], destination: int = 0, source: int = 0) -> Table:
    """The table for copies (destination, source, number of bytes), 1 to MAX_RANGES of them, none empty.

    Their addresses count from `destination` and `source`.
    """
    # Here, as no process needs it before it copies. In columns 2,048 copies take the host 0.16 ms, one by one 0.78, in
    # which a device copies a gigabyte.
    import numpy as np

    count = len(ranges)
    columns = np.fromiter(chain.from_iterable(ranges), np.uint64, 3 * count).reshape(count, 3).T
    words = np.zeros(4 * count + 1, np.uint64)
    np.add(columns[0], np.uint64(destination), out=words[:count])
    np.add(columns[1], np.uint64(source), out=words[count : 2 * count])
    words[2 * count : 3 * count] = columns[2]
    pieces = (columns[2] + np.uint64(PIECE_BYTES - 1)) // np.uint64(PIECE_BYTES)
    np.cumsum(pieces, out=words[3 * count + 1 :])
    return Table(words.tobytes(), count, int(words[-1]))


class GatherKernel:
    """The kernel on the current device. Raises what CuPy raises if it cannot be compiled or loaded."""

    def __init__(self, cupy: Any) -> None:
        self._word = cupy.uint64
        self._kernel = cupy.RawKernel(SOURCE, NAME, options=OPTIONS)
        self._kernel.compile()

    def launch(self, stream: Any, pointer: int, table: Table) -> None:
        """Put the kernel into a stream; by then the table must be at `pointer` on the device."""
        arguments = (self._word(pointer), self._word(table.num_ranges), self._word(table.num_pieces))
        with stream:
            self._kernel((table.num_blocks,), (NUM_THREADS,), arguments)

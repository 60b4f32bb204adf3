"""Batch sizes for which a decode step is captured as a CUDA graph; a step is padded to the next of them (pure)."""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

# As many rows as `max_running`. A graph is captured for each of 35 sizes, which takes time and memory at the start.
MAX_BUCKET: Final = 256
_SMALL: Final = (1, 2, 4)
# mini-sglang's; at most seven rows of a step are padding.
_STEP: Final = 8


def bucket_sizes(most: int = MAX_BUCKET) -> list[int]:
    """1, 2, 4, then 8 to `most` in steps of 8 (mini-sglang's); `most` itself is the last even if it is no multiple.

    Small steps, because a padded row costs as much as a real one; raises ValueError if `most` is below 1.
    """
    if most < 1:
        raise ValueError(f"the largest bucket must have at least one row, not {most}")
    sizes = {size for size in (*_SMALL, *range(_STEP, most + 1, _STEP)) if size <= most}
    return sorted(sizes | {most})


class Buckets:
    """Chooses the graph for a batch."""

    def __init__(self, sizes: Iterable[int]) -> None:
        """`sizes` in any order; raises ValueError if there are none, or one is below 1."""
        self.sizes: tuple[int, ...] = tuple(sorted(set(sizes)))
        if not self.sizes or self.sizes[0] < 1:
            raise ValueError(f"buckets must be numbers of rows, each at least 1, not {self.sizes}")

    @property
    def capture_order(self) -> tuple[int, ...]:
        """Largest first: the memory of the first graph then holds all that follow."""
        return self.sizes[::-1]

    def choose(self, num_rows: int) -> int:
        """Rows that a batch of `num_rows` is padded to; 0 if no graph is large enough, or there are no rows."""
        if num_rows < 1:
            return 0
        index = bisect_left(self.sizes, num_rows)
        return self.sizes[index] if index < len(self.sizes) else 0

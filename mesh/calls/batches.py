"""Batching: several items in one message, as many as it may carry.

A message costs sender and receiver about 50 µs of CPU each, whatever it holds, so the items that gather for one peer in
one turn of the loop are sent together. Pure.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

Item = TypeVar("Item")

MAX_ITEMS: Final = 256
"""At 50 µs for a message, 0.2 µs an item: more in one would save nothing, and would hold up the receiver's loop."""
MAX_BYTES: Final = 1 << 20
"""A sixteenth of the largest body. A body is decoded in one go, and the receiver does nothing else meanwhile."""


def cut(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """`items` in lists of at most `MAX_ITEMS` and, by `size`, `MAX_BYTES`; a larger one alone, to be refused alone."""
    batch: list[Item] = []
    # Far below a body's 16 MiB: sizes are estimates, and a receiver does nothing else while it handles a batch.
    num_bytes = 0
    for item in items:
        more = size(item)
        if batch and (len(batch) >= MAX_ITEMS or num_bytes + more > MAX_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(item)
        num_bytes += more
    if batch:
        yield batch

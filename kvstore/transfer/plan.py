"""Which bytes go where: runs of pages, and heads between groups of unequal tensor parallelism.

Pages are rarely as scattered as their lists look; copying runs instead of pages costs a fraction of the descriptors
(1024 descriptors cost up to 3.5 times one). Between unequal TP sizes a page is cut by KV heads: rank r of a group holds
heads `r * per .. (r + 1) * per - 1` if the heads divide among the ranks, or head `r // replicas` if ranks outnumber
heads. Pure; used by `puller.py`, and by `nodes/models` to cut heads for ranks.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvstore.errors import TransferError
from kvstore.layout import ITEM_BYTES, KVLayout


class Descriptor(NamedTuple):
    """Bytes to move; offsets count from page 0 of the local and the remote pool."""

    local_offset: int
    remote_offset: int
    num_bytes: int


class PageRun(NamedTuple):
    """`num_pages` pages that are neighbours at both ends."""

    source: int
    destination: int
    num_pages: int


class HeadSlice(NamedTuple):
    """Heads to copy from one source rank: `num_heads` of its heads from `source_head` on, to `destination_head` on."""

    source_rank: int
    source_head: int
    destination_head: int
    num_heads: int


class StridedCopy(NamedTuple):
    """`num_pieces` pieces of `num_bytes`, each one stride after the last; offsets count from a page's start."""

    source_offset: int
    destination_offset: int
    num_bytes: int
    source_stride: int
    destination_stride: int
    num_pieces: int


def coalesce(source_pages: Sequence[int], destination_pages: Sequence[int]) -> list[PageRun]:
    """Runs of pages that ascend together at both ends, in the order given; ValueError for lists of unequal length."""
    runs: list[PageRun] = []
    first_source, first_destination, count = 0, 0, 0
    for source, destination in zip(source_pages, destination_pages, strict=True):
        # Both must continue: pages that are neighbours at one end only are two copies.
        if count and source == first_source + count and destination == first_destination + count:
            count += 1
            continue
        if count:
            runs.append(PageRun(first_source, first_destination, count))
        first_source, first_destination, count = source, destination, 1
    if count:
        runs.append(PageRun(first_source, first_destination, count))
    return runs


def page_descriptors(runs: Sequence[PageRun], page_bytes: int) -> list[Descriptor]:
    return [
        Descriptor(run.destination * page_bytes, run.source * page_bytes, run.num_pages * page_bytes) for run in runs
    ]


def held_heads(tp_rank: int, tp_size: int, total_kv_heads: int) -> range:
    """The model's KV heads that a rank holds. Raises TransferError `layout_mismatch` if they do not divide evenly."""
    if total_kv_heads % tp_size == 0:
        per_rank = total_kv_heads // tp_size
        return range(tp_rank * per_rank, (tp_rank + 1) * per_rank)
    # More ranks than KV heads: several ranks hold each head, as is usual for grouped-query attention.
    if tp_size % total_kv_heads == 0:
        head = tp_rank // (tp_size // total_kv_heads)
        return range(head, head + 1)
    raise TransferError(
        "layout_mismatch",
        f"{total_kv_heads} KV heads cannot be divided evenly among {tp_size} ranks; choose another TP size",
    )


def map_heads(source_tp_size: int, destination: KVLayout, total_kv_heads: int) -> list[HeadSlice]:
    """What a destination rank pulls from which source rank: each of its heads exactly once.

    If several source ranks hold the same head, destination ranks spread over them. Raises like `held_heads`.
    """
    wanted = held_heads(destination.tp_rank, destination.tp_size, total_kv_heads)
    per_source = max(1, total_kv_heads // source_tp_size)
    num_replicas = max(1, source_tp_size // total_kv_heads)
    slices: list[HeadSlice] = []
    head = wanted.start
    while head < wanted.stop:
        owner = head // per_source
        # Otherwise all destination ranks would read from the first rank that holds the head.
        rank = owner * num_replicas + destination.tp_rank % num_replicas
        held = held_heads(rank, source_tp_size, total_kv_heads)
        count = min(held.stop, wanted.stop) - head
        slices.append(HeadSlice(rank, head - held.start, head - wanted.start, count))
        head += count
    return slices


def head_copies(source: KVLayout, destination: KVLayout, piece: HeadSlice) -> StridedCopy:
    """One piece for each token of K and of V in each layer. Raises TransferError `layout_mismatch`."""
    alike = ("num_layers", "head_dim", "dtype", "page_size", "fingerprint", "format_version")
    different = [name for name in alike if getattr(source, name) != getattr(destination, name)]
    if different:
        raise TransferError("layout_mismatch", f"the two pools differ in {', '.join(different)}")
    head_bytes = source.head_dim * ITEM_BYTES[source.dtype]
    return StridedCopy(
        source_offset=piece.source_head * head_bytes,
        destination_offset=piece.destination_head * head_bytes,
        num_bytes=piece.num_heads * head_bytes,
        source_stride=source.num_kv_heads * head_bytes,
        destination_stride=destination.num_kv_heads * head_bytes,
        num_pieces=source.num_layers * 2 * source.page_size,
    )


def strided_descriptors(runs: Sequence[PageRun], copy: StridedCopy) -> Iterator[Descriptor]:
    """A strided copy over runs of pages. A slice that is a whole page at both ends is copied in runs."""
    source_page = copy.source_stride * copy.num_pieces
    destination_page = copy.destination_stride * copy.num_pieces
    # The same heads at both ends: whole runs, not `2 * layers * page_size` pieces for each page.
    if copy.num_bytes == copy.source_stride == copy.destination_stride:
        yield from page_descriptors(runs, source_page)
        return
    for run in runs:
        for index in range(run.num_pages):
            source = (run.source + index) * source_page + copy.source_offset
            destination = (run.destination + index) * destination_page + copy.destination_offset
            for piece in range(copy.num_pieces):
                yield Descriptor(
                    destination + piece * copy.destination_stride, source + piece * copy.source_stride, copy.num_bytes
                )

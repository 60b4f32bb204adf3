from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import TransferError
from kvstore.layout import KVLayout
from kvstore.transfer.base import Descriptor
from kvstore.transfer.plan import (
    PageRun,
    StridedCopy,
    coalesce,
    head_copies,
    held_heads,
    map_heads,
    page_descriptors,
    strided_descriptors,
)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=20))
def test_runs_are_the_pages_and_as_few_as_can_be(pairs: list[tuple[int, int]]) -> None:
    runs = coalesce([source for source, _ in pairs], [destination for _, destination in pairs])
    spelled = [(run.source + i, run.destination + i) for run in runs for i in range(run.num_pages)]
    assert spelled == pairs
    for left, right in pairwise(runs):
        together = (left.source + left.num_pages, left.destination + left.num_pages)
        assert together != (right.source, right.destination)


def test_lists_of_unequal_length_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="zip"):
        coalesce([1, 2], [1])


def test_runs_as_bytes() -> None:
    assert page_descriptors([PageRun(3, 5, 2)], 100) == [Descriptor(500, 300, 200)]
    assert page_descriptors([], 100) == []


TP_SIZES = st.sampled_from([1, 2, 4, 8, 16])
HEADS = st.sampled_from([1, 2, 4, 8])


@given(TP_SIZES, TP_SIZES, HEADS)
def test_every_head_of_every_destination_comes_from_a_rank_that_has_it(
    source_tp: int, destination_tp: int, total: int
) -> None:
    used: set[int] = set()
    for rank in range(destination_tp):
        wanted = held_heads(rank, destination_tp, total)
        layout = KVLayout(num_layers=1, num_kv_heads=len(wanted), head_dim=4, tp_rank=rank, tp_size=destination_tp)
        filled: list[int] = []
        for piece in map_heads(source_tp, layout, total):
            held = held_heads(piece.source_rank, source_tp, total)
            used.add(piece.source_rank)
            for index in range(piece.num_heads):
                assert held[piece.source_head + index] == wanted[piece.destination_head + index]
                filled.append(piece.destination_head + index)
        assert filled == list(range(len(wanted)))
    if destination_tp >= source_tp:
        assert used == set(range(source_tp)), "load spreads over all replicas"


@pytest.mark.parametrize(("tp_size", "total"), [(3, 4), (4, 6)])
def test_heads_that_cannot_be_dealt_out(tp_size: int, total: int) -> None:
    with pytest.raises(TransferError, match="cannot be divided evenly") as caught:
        held_heads(0, tp_size, total)
    assert caught.value.code == "layout_mismatch"


def layouts(source_tp: int, destination_tp: int, total: int) -> tuple[list[KVLayout], list[KVLayout]]:
    def group(tp_size: int) -> list[KVLayout]:
        return [
            KVLayout(
                num_layers=2,
                num_kv_heads=len(held_heads(rank, tp_size, total)),
                head_dim=1,
                dtype="uint8",
                page_size=2,
                tp_rank=rank,
                tp_size=tp_size,
            )
            for rank in range(tp_size)
        ]

    return group(source_tp), group(destination_tp)


@given(TP_SIZES, TP_SIZES, HEADS)
def test_bytes_arrive_where_the_destination_would_have_computed_them(
    source_tp: int, destination_tp: int, total: int
) -> None:
    """Fill source pools with a number for (page, layer, k or v, token, head); each destination must hold its own."""
    sources, destinations = layouts(source_tp, destination_tp, total)

    def content(layout: KVLayout, page: int) -> bytes:
        heads = held_heads(layout.tp_rank, layout.tp_size, total)
        rows = layout.num_layers * 2 * layout.page_size
        return bytes(chain.from_iterable(((page * 64 + row * 8 + head) % 251 for head in heads) for row in range(rows)))

    pages = [2, 3, 1]
    targets = [1, 2, 4]
    pools = [bytearray(b"".join(content(layout, page) for page in range(5))) for layout in sources]
    for layout in destinations:
        pool = bytearray(5 * layout.page_bytes)
        for piece in map_heads(source_tp, layout, total):
            copy = head_copies(sources[piece.source_rank], layout, piece)
            for local, remote, num_bytes in strided_descriptors(coalesce(pages, targets), copy):
                pool[local : local + num_bytes] = pools[piece.source_rank][remote : remote + num_bytes]
        for page, target in zip(pages, targets, strict=True):
            size = layout.page_bytes
            assert bytes(pool[target * size : (target + 1) * size]) == content(layout, page)


def test_equal_layouts_copy_in_runs() -> None:
    [source], [destination] = layouts(1, 1, 4)
    copy = head_copies(source, destination, map_heads(1, destination, 4)[0])
    assert copy == StridedCopy(0, 0, 4, 4, 4, 8)
    assert list(strided_descriptors([PageRun(1, 2, 3)], copy)) == [Descriptor(64, 32, 96)]


def test_pools_that_differ_in_more_than_heads_do_not_mix() -> None:
    [source], [destination] = layouts(1, 1, 4)
    other = KVLayout(num_layers=3, num_kv_heads=4, head_dim=1, dtype="float32", page_size=2)
    with pytest.raises(TransferError, match="num_layers, dtype"):
        head_copies(source, other, map_heads(1, destination, 4)[0])

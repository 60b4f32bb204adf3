"""The arrays of a batch say of each row what the step says."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from nodes.worker.ops.torch.batch import host_batch, pack, unpack
from tests.nodes.worker.torch_running import GREEDY, Row, step

PAGE = 4


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    found: list[Row] = []
    for number in range(draw(st.integers(1, 7))):
        start, count = draw(st.integers(0, 20)), draw(st.sampled_from([1, 1, 2, 9]))
        spare = draw(st.integers(0, 2))
        pages = [100 * number + i + 1 for i in range(-(-(start + count) // PAGE) + spare)]
        ids = [1000 * number + i for i in range(count)]
        found.append(Row(start, ids, pages, draw(st.sampled_from([GREEDY, None])), prompt=1))
    return found


@given(rows())
def test_every_row_is_where_its_sequence_says(given_rows: list[Row]) -> None:
    batch = host_batch(step(*given_rows), PAGE)
    order = sorted(range(len(given_rows)), key=lambda i: len(given_rows[i].ids) > 1)
    expected, lasts = [], {}
    for i in order:
        row = given_rows[i]
        for n, token in enumerate(row.ids):
            position = row.start + n
            expected.append((token, position, row.pages[position // PAGE], position % PAGE, -1))
        lasts[i] = len(expected) - 1
    arrays = (batch.token_ids, batch.positions, batch.write_pages, batch.write_offsets, batch.sources)
    assert list(zip(*(array.tolist() for array in arrays), strict=True)) == expected
    assert batch.num_decodes == sum(len(row.ids) == 1 for row in given_rows)
    assert batch.sampling == [i for i in order if given_rows[i].sampling is not None]
    assert batch.sampled.tolist() == [lasts[i] for i in batch.sampling]
    table = batch.table
    for n, i in enumerate(order):
        row, end = given_rows[i], given_rows[i].start + len(given_rows[i].ids)
        pages = table.indices[table.indptr[n] : table.indptr[n + 1]].tolist()
        assert pages == row.pages[: -(-end // PAGE)]
        assert (len(pages) - 1) * PAGE + table.last_page_len[n] == end == table.lengths[n]
        assert table.query_indptr[n + 1] - table.query_indptr[n] == len(row.ids)
    split = batch.num_decodes
    parts = [table.part(0, split), table.part(split, len(order))]
    assert np.concatenate([part.indices for part in parts]).tolist() == table.indices.tolist()
    assert all(part.indptr[0] == part.query_indptr[0] == 0 for part in parts)


@given(st.integers(1, 8), st.integers(0, 9))
def test_padding_is_sequences_of_one_position_on_page_0(num_rows: int, extra: int) -> None:
    plan = step(*(Row(5, [7], [3, 4 + i], GREEDY) for i in range(num_rows)))
    batch = host_batch(plan, PAGE)
    padded = batch.padded(num_rows + extra)
    assert padded.num_rows == padded.num_decodes == padded.table.num_sequences == num_rows + extra
    assert padded.is_decode
    assert padded.sampled.tolist() == list(range(num_rows))
    table = padded.table
    assert table.indices.tolist() == batch.table.indices.tolist() + [0] * extra
    assert table.indptr.tolist()[num_rows:] == [2 * num_rows + i for i in range(extra + 1)]
    assert table.lengths.tolist() == [6] * num_rows + [1] * extra
    assert padded.positions.tolist() == [5] * num_rows + [0] * extra
    assert all(array.dtype == np.int32 for array in (*table, padded.token_ids, padded.write_pages, padded.sources))


@given(rows())
def test_what_is_packed_comes_out_again(given_rows: list[Row]) -> None:
    batch = host_batch(step(*given_rows), PAGE)
    packed = pack(batch)
    assert packed.dtype == np.int32
    arrays = unpack(torch.from_numpy(packed), batch.num_rows, len(batch.sampled))
    for name in ("token_ids", "positions", "write_pages", "write_offsets", "sources", "sampled"):
        assert getattr(arrays, name).tolist() == getattr(batch, name).tolist()
    assert arrays.indices.tolist() == batch.table.indices.tolist()

"""Buckets hold every batch up to the largest, with little padding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.worker.cuda.buckets import Buckets, bucket_sizes


def test_sizes() -> None:
    assert bucket_sizes() == [1, 2, 4, *range(8, 257, 8)]
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(3) == [1, 2, 3]
    assert bucket_sizes(20) == [1, 2, 4, 8, 16, 20]
    with pytest.raises(ValueError, match="at least one row"):
        bucket_sizes(0)


@given(st.integers(1, 300), st.integers(-2, 320))
def test_the_smallest_that_holds_the_batch_is_chosen(most: int, num_rows: int) -> None:
    buckets = Buckets(bucket_sizes(most))
    chosen = buckets.choose(num_rows)
    if 1 <= num_rows <= most:
        assert num_rows <= chosen < num_rows + 8
        assert all(size >= chosen or size < num_rows for size in buckets.sizes)
    else:
        assert chosen == 0


def test_order_and_bad_sizes() -> None:
    assert Buckets([4, 1, 2, 2]).capture_order == (4, 2, 1)
    for sizes in ([], [0, 1]):
        with pytest.raises(ValueError, match="buckets must be numbers of rows"):
            Buckets(sizes)

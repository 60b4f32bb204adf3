"""Native linears and norms: right, the same bits however rows are put together, memory given back."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodes.worker.errors import WeightsUnfit
from nodes.worker.ops.native.builds import Library
from nodes.worker.weights.quantization import rounded_to_int8
from tests.nodes.worker.native_builds import resident_mb
from tests.nodes.worker.native_products import Product, norm

DTYPES = [torch.float32, torch.bfloat16]
LENIENT = list(HealthCheck)


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Shape(NamedTuple):
    """A layer of `n` outputs and `k` inputs, and where its rows are cut, the last cut being their number."""

    n: int
    k: int
    cuts: list[int]
    is_biased: bool
    dtype: torch.dtype
    threads: int
    is_int8: bool = False


def check_linear(library: Library, shape: Shape) -> None:
    n, k, cuts, is_biased, dtype, threads, is_int8 = shape
    rows, deviation = cuts[-1], k**-0.5
    gate, up = ((drawn(seed, n, k) * deviation).to(dtype) for seed in (1, 2))
    x, other = drawn(3, rows, k, dtype=dtype), drawn(4, rows, n, dtype=dtype)
    biases = tuple(drawn(seed, n, dtype=dtype) for seed in (5, 6)) if is_biased else ()
    library.set_threads(1)
    linear = Product(library, (gate,), biases[:1], is_int8=is_int8)
    # In float32, since bfloat16 has not all that int8 and a scale can express.
    rights = [rounded_to_int8(weight.float()) if is_int8 else weight for weight in (gate, up)]
    products = [x.double() @ weight.double().T for weight in rights]
    if biases:
        products = [product + bias.double() for product, bias in zip(products, biases, strict=True)]
    activations = {"silu": torch.nn.functional.silu, "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh")}
    cases: list[tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = [
        (linear, products[0]),
        (lambda x: linear(x, other[: x.shape[0]]), products[0] + other.double()),
    ]
    for name, activation in activations.items():
        gated = Product(library, (gate, up), biases, name, is_int8=is_int8)
        cases.append((gated, activation(products[0]) * products[1]))
    rounding = 2.0 ** (-8 if dtype == torch.bfloat16 else -20)
    for compute, right in cases:
        library.set_threads(1)
        whole = compute(x)
        assert torch.allclose(whole.double(), right, rtol=rounding, atol=2e-5)
        library.set_threads(threads)
        assert torch.equal(compute(x), whole)
    assert all(torch.equal(gated(x[a:b]), whole[a:b]) for a, b in pairwise([0, *cuts]))
    assert all(torch.equal(linear(x[a:b]), linear(x)[a:b]) for a, b in pairwise([0, *cuts]))


@settings(max_examples=25, deadline=None, suppress_health_check=LENIENT)
@given(data=st.data())
def test_any_shape_is_right_and_any_cut_gives_the_same_bits(library: Library, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    n, k = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 300))
    cuts = sorted(data.draw(st.sets(st.integers(1, 70), min_size=1, max_size=6)))
    is_biased, threads, is_int8 = data.draw(st.booleans()), data.draw(st.integers(1, 3)), data.draw(st.booleans())
    check_linear(library, Shape(n, k, cuts, is_biased, dtype, threads, is_int8))


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_blocks_of_rows_and_of_depth(library: Library, dtype: torch.dtype, is_int8: bool) -> None:
    """More panels than threads want, and fewer: items are then panels, or blocks of rows of one."""
    check_linear(library, Shape(1600, 1027, [1, 61, 200], True, dtype, 3, is_int8))
    check_linear(library, Shape(70, 1027, [1, 5, 61, 290], True, dtype, 3, is_int8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_what_torch_rounds_to(library: Library, dtype: torch.dtype) -> None:
    """Every number of every row: those of zeros, of one number, of numbers next to nothing, ties, the largest."""
    weight = drawn(8, 130, 67) * 0.02
    weight[3], weight[4] = 0, 1e-39
    weight[5] = torch.arange(67) - 33.5
    weight[6, :], weight[6, 9] = 0, -3e38
    weight = weight.to(dtype)
    expected = rounded_to_int8(weight)
    assert float((expected.double() - weight.double()).abs().max() / weight.double().abs().max()) < 0.005
    assert not expected[3].any()
    assert not expected[4].any()
    # The product by a unit vector is a column of it.
    assert torch.equal(Product(library, (weight,), is_int8=True)(torch.eye(67, dtype=dtype)), expected.T)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_int8_of_what_is_not_finite_is_refused(library: Library, bad: float) -> None:
    weight = drawn(9, 70, 5)
    weight[69, 4] = bad
    with pytest.raises(WeightsUnfit, match="not finite"):
        Product(library, (drawn(9, 70, 5), weight), is_int8=True)
    with pytest.raises(WeightsUnfit, match="not finite"):
        rounded_to_int8(weight)


def test_a_weight_that_memory_cannot_hold_is_a_memory_error_that_says_its_size(library: Library) -> None:
    # 4 PiB, of which nothing is there: more than a process can address.
    weight = torch.empty(1 << 25, 1 << 25, device="meta")
    with pytest.raises(MemoryError, match=r"cannot allocate [\d,]{21,} bytes for a weight of 33554432 x 33554432"):
        Product(library, (weight,))


def test_extremes_stay_in_their_own_rows(library: Library) -> None:
    gated, x = Product(library, (torch.eye(70), torch.eye(70))), drawn(5, 4, 70)
    clean = gated(x)
    x[1, 3] = float("nan")
    x[2, 0], x[2, 1] = 200.0, -200.0
    found = gated(x)
    assert bool(found[1].isnan().all())
    assert found[2, 0] == 40_000.0
    assert abs(float(found[2, 1])) < 1e-30
    assert torch.equal(found[[0, 3]], clean[[0, 3]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 24, 67, 896])
def test_norms_are_torchs(library: Library, dtype: torch.dtype, size: int) -> None:
    x, weight = drawn(6, 5, size, dtype=dtype), (1 + 0.1 * drawn(7, size)).to(dtype)
    found = norm(library, x, weight, 1e-6)
    expected = torch.rms_norm(x.double(), [size], weight.double(), 1e-6)
    assert torch.allclose(found.double(), expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=0)
    assert all(torch.equal(norm(library, x[row : row + 1], weight, 1e-6)[0], found[row]) for row in range(5))


def test_a_weight_that_is_dropped_is_given_back(library: Library) -> None:
    weight = torch.zeros(4096, 4096)
    before = resident_mb()
    linear = Product(library, (weight,))
    assert resident_mb() - before >= 60
    del linear
    assert resident_mb() - before < 8


def test_callers_at_the_same_time_and_forked_ones_get_the_same_bits(library: Library) -> None:
    linear, x = Product(library, (drawn(1, 3000, 200),)), drawn(2, 9, 200)
    expected = linear(x)
    library.set_threads(3)
    with ThreadPoolExecutor(4) as threads:
        assert all(torch.equal(found, expected) for found in threads.map(linear, [x] * 200))
    # The threads that helped are not in the child, which starts its own.
    child = os.fork()
    if not child:
        os._exit(0 if all(torch.equal(linear(x), expected) for _ in range(50)) else 1)
    assert os.waitpid(child, 0)[1] == 0

"""The kernel for products of few rows: its source run as C++ on the host, and its place in a network."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from nodes.models.parts import Activation
from nodes.worker.cuda import few_rows
from nodes.worker.cuda.few_rows import MOST_ROWS, NAME, SOURCE, options, split_of
from nodes.worker.cuda.own_kernels import BFLOAT16, NUM_THREADS
from nodes.worker.ops.torch.few_rows import FewRows
from nodes.worker.ops.torch.hidden import Hidden, Unnormed
from nodes.worker.ops.torch.kernels import TorchKernels
from tests.nodes.worker.cuda.kernels_on_host import compiled
from tests.nodes.worker.cuda.test_device_runner import IDS, text
from tests.nodes.worker.cuda.test_flashinfer_backend import MODELS, fake_runner
from tests.nodes.worker.torch_running import logits_by_chunks

STREAMED = "static uint4 streamed(const uint4 *at) { return *at; }\n"
# Outputs for a block and a half; vectors for two rounds of loads of a warp, the last one of them not whole.
NUM_OUT, NUM_IN = 12, 8 * (32 * 8 + 21)


def by_torch(x: Tensor | Unnormed, weight: Tensor, bias: Tensor | None, activation: Activation | None = None) -> Tensor:
    """The same with one operation after the other, sums in float32."""
    rows = x.normed() if isinstance(x, Unnormed) else x
    product = rows.float() @ weight.float().T
    product = (product if bias is None else product + bias.float()).to(rows.dtype)
    return product if activation is None else TorchKernels().gated(product, activation)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


VARIANTS = [
    (1, False, None, 1), (2, False, None, 4), (1, True, "silu", 2), (2, True, None, 8), (1, True, "gelu_tanh", 1),
]  # fmt: skip


@pytest.mark.parametrize(("num_rows", "has_norm", "activation", "split"), VARIANTS)
def test_the_kernel_does_what_operations_do(
    tmp_path: Path, num_rows: int, has_norm: bool, activation: Activation | None, split: int
) -> None:
    variant = options(num_rows, has_norm=has_norm, activation=activation)
    launch = compiled(BFLOAT16 + STREAMED + SOURCE, NAME, variant, tmp_path)
    torch.manual_seed(4)
    weight = drawn(NUM_OUT * (2 if activation else 1), NUM_IN)
    for has_bias, is_pending in itertools.product((False, True), (False, True)):
        bias = drawn(len(weight)) if has_bias else None
        rows, pending, norm = drawn(num_rows, NUM_IN), drawn(num_rows, NUM_IN) if is_pending else None, drawn(NUM_IN)
        out, sums = (torch.full((num_rows, size), torch.nan).to(torch.bfloat16) for size in (NUM_OUT, NUM_IN))
        pointers = [None if one is None else one.data_ptr() for one in (rows, pending, norm)]
        launch(
            -(-NUM_OUT // (8 // split)), NUM_THREADS, weight.data_ptr(), bias.data_ptr() if bias is not None else None,
            NUM_OUT, NUM_IN // 8, split, *pointers, 1e-6, sums.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        hidden = Hidden(rows.clone(), pending)
        expected = by_torch(
            Unnormed(hidden, norm, 1e-6, TorchKernels()) if has_norm else rows, weight, bias, activation
        )
        # One rounding apart where a sum lies between two: of 2,216 products of numbers around 1.
        assert torch.allclose(out.float(), expected.float(), atol=2**-2, rtol=2**-6), (has_bias, is_pending)
        if has_norm and is_pending:
            assert torch.equal(sums, hidden.rows), "what was pending is added, rounded, in a new place"
        else:
            assert sums.isnan().all()


def test_a_row_has_the_same_bits_whatever_is_computed_with_it(tmp_path: Path) -> None:
    torch.manual_seed(5)
    weight, rows, found = drawn(NUM_OUT, NUM_IN), drawn(MOST_ROWS, NUM_IN), list[Tensor]()
    for num_rows in range(1, MOST_ROWS + 1):
        launch = compiled(
            BFLOAT16 + STREAMED + SOURCE, NAME, options(num_rows, has_norm=False, activation=None), tmp_path
        )
        out = torch.zeros(num_rows, NUM_OUT).to(torch.bfloat16)
        launch(
            6, NUM_THREADS, weight.data_ptr(), None, NUM_OUT, NUM_IN // 8, 4, rows.data_ptr(), None, None, 0.0, None,
            out.data_ptr(),
        )  # fmt: skip
        found.append(out)
    assert all(torch.equal(out, found[-1][: len(out)]) for out in found)


@pytest.mark.parametrize(("num_out", "num_in"), [(1024, 2048), (1024, 3072), (4096, 1024), (151_936, 1024), (8, 64)])
def test_every_warp_has_work(num_out: int, num_in: int) -> None:
    split = split_of(num_out, num_in, 132)
    assert split in (1, 2, 4, 8)
    assert split == 1 or num_in // (split * 32 * 8) >= 3, "each of them has loads to begin with"
    assert split == 1 or num_out * split // 2 < 32 * 132, "no more of them than the device wants"


class PlayedFewRows(FewRows):
    """Plays `FewRowsKernel` on CPU tensors."""

    def __init__(self) -> None:
        self.taken: set[str] = set()

    @override
    def takes(self, weight: Tensor, num_rows: int, activation: Activation | None = None) -> bool:
        return 0 < num_rows <= 4 and weight.dtype == torch.bfloat16

    @override
    def takes_norm(self, num_rows: int, num_in: int) -> bool:
        return num_rows * num_in * 2 <= few_rows.MOST_SHARED

    @override
    def product(
        self, x: Tensor | Unnormed, weight: Tensor, bias: Tensor | None, activation: Activation | None = None
    ) -> Tensor:
        self.taken.add("normed" if isinstance(x, Unnormed) else activation or "plain")
        return by_torch(x, weight, bias, activation)


@pytest.mark.parametrize("model", [*MODELS, "random:tiny-olmo2", "random:tiny-gemma3", "random:tiny-qwen3-moe"])
def test_a_network_gives_the_same_with_it(model: str) -> None:
    played, sizes = PlayedFewRows(), [16, 48, 3, 30, 1, 22, 4, 25, 1]
    expected = logits_by_chunks(fake_runner(model), IDS, list(range(1, 11)), sizes)
    found = logits_by_chunks(fake_runner(model, few_rows=played), IDS, list(range(1, 11)), sizes)
    assert torch.allclose(found.float(), expected.float(), atol=0.02, rtol=0.02)
    assert "plain" in played.taken
    # OLMo 2 norms what products give, not what they take.
    assert ("normed" in played.taken) == (model != "random:tiny-olmo2")


def test_captured_steps_have_it_too() -> None:
    plain = fake_runner("random:tiny-qwen3")
    replaying = fake_runner("random:tiny-qwen3", [1, 2, 4], few_rows=PlayedFewRows())
    assert text(replaying, 3, 6) == text(plain, 3, 6)

"""The kernel that norms, rotates and places heads: its source run as C++ on the host, and its place in a network."""

import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nodes.worker.cuda.heads import NAME, SOURCE, options
from nodes.worker.ops.torch.attention import HeadForm
from nodes.worker.ops.torch.kernels import TorchKernels
from tests.nodes.worker.cuda.kernels_on_host import compiled
from tests.nodes.worker.cuda.test_device_runner import IDS, text
from tests.nodes.worker.cuda.test_flashinfer_backend import MODELS, fake_runner
from tests.nodes.worker.torch_running import logits_by_chunks

NUM_ROWS, NUM_Q, NUM_KV, PAGE = 5, 4, 2, 16


def placed_by_torch(
    heads: Tensor, form: HeadForm, positions: Tensor, k_pages: Tensor, v_pages: Tensor, pages: Tensor, offsets: Tensor
) -> None:
    """The same with one operation after the other."""
    num_kv = k_pages.shape[2]
    q, k, v = torch.split(heads, [heads.shape[1] - 2 * num_kv, num_kv, num_kv], 1)
    for weight, eps, part in ((form.q_weight, form.q_eps, q), (form.k_weight, form.k_eps, k)):
        if weight is not None:
            TorchKernels().head_norm(part, weight, eps)
    TorchKernels().rotate(positions, q, k, form.cos_sin)
    if form.q_scale != 1:
        q.mul_(form.q_scale)
    k_pages[pages.long(), offsets.long()] = k
    v_pages[pages.long(), offsets.long()] = v


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_kernel_does_what_four_operations_do(tmp_path: Path, head_dim: int) -> None:
    launch = compiled(SOURCE, NAME, options(head_dim), tmp_path)
    torch.manual_seed(3)
    positions = torch.tensor([0, 1, 7, 30, 11], dtype=torch.int32)
    write_pages = torch.tensor([2, 2, 0, 5, 1], dtype=torch.int32)
    write_offsets = torch.tensor([0, 1, 15, 3, 9], dtype=torch.int32)
    angles = torch.rand(40, head_dim // 2) * 7
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    weights = [torch.randn(head_dim).to(torch.bfloat16) for _ in range(2)]
    for has_norms, q_scale in product((True, False), (1.0, 0.37)):
        q_weight, k_weight = weights if has_norms else (None, None)
        form = HeadForm(q_weight, k_weight, 1e-6, 1e-5, q_scale, cos_sin)
        heads = (torch.randn(NUM_ROWS, NUM_Q + 2 * NUM_KV, head_dim) * 3).to(torch.bfloat16)
        # Three layers of a page-major pool, of which the kernel must touch the second only.
        pool = torch.randn(6, 3, 2, PAGE, NUM_KV, head_dim).to(torch.bfloat16)
        expected, expected_pool = heads.clone(), pool.clone()
        layer = (expected_pool[:, 1, 0], expected_pool[:, 1, 1])
        placed_by_torch(expected, form, positions, *layer, write_pages, write_offsets)
        k_pages, v_pages = pool[:, 1, 0], pool[:, 1, 1]
        addresses = [None if one is None else one.data_ptr() for one in (q_weight, k_weight)]
        launch(
            # More warps than there are heads: those left over do nothing.
            NUM_ROWS * (NUM_Q + 2 * NUM_KV) + 3, 32, heads.data_ptr(), heads.stride(0), NUM_ROWS, positions.data_ptr(),
            write_pages.data_ptr(), write_offsets.data_ptr(), NUM_Q, NUM_KV, *addresses, 1e-6, 1e-5, q_scale,
            cos_sin.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr(), k_pages.stride(0), k_pages.stride(1),
        )  # fmt: skip
        # One rounding to bfloat16 apart, since sums are taken in another order.
        near = {"atol": 2**-6, "rtol": 2**-7}
        assert torch.allclose(heads.float(), expected.float(), **near)
        assert torch.allclose(pool.float(), expected_pool.float(), **near)
        untouched = torch.ones(pool.shape[:4], dtype=torch.bool)
        untouched[write_pages.long(), 1, :, write_offsets.long()] = False
        assert torch.equal(pool[untouched], expected_pool[untouched])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_it_compiles_for_a_gpu(tmp_path: Path, head_dim: int) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc here")
    source, target = tmp_path / "heads.cu", tmp_path / "heads.cubin"
    source.write_text(SOURCE)
    words = ["nvcc", "-arch=sm_90a", "-cubin", *options(head_dim), "-o", str(target), str(source)]
    subprocess.run(words, check=True, capture_output=True)
    assert NAME.encode() in target.read_bytes()


class PlayedKernel:
    """Plays `HeadsKernel` on CPU tensors."""

    def __init__(self, layers: list[tuple[Tensor, Tensor]], num_heads: int) -> None:
        self._layers, self._num_heads = layers, num_heads
        self.num_launches = 0

    def takes(self, form: HeadForm) -> bool:
        return form.q_weight is None or form.q_weight.shape[0] == self._layers[0][0].shape[3]

    def launch(
        self, layer: int, heads: Tensor, form: HeadForm, positions: Tensor, write_pages: Tensor, write_offsets: Tensor
    ) -> None:
        self.num_launches += 1
        assert heads.shape[1] == self._num_heads + 2 * self._layers[0][0].shape[2]
        assert heads.stride()[1:] == (heads.shape[2], 1)
        assert {one.dtype for one in (positions, write_pages, write_offsets)} == {torch.int32}
        placed_by_torch(heads, form, positions, *self._layers[layer], write_pages, write_offsets)


@pytest.mark.parametrize("model", [*MODELS, "random:tiny-olmo2", "random:tiny-gemma3"])
def test_a_network_gives_the_same_with_it(model: str) -> None:
    made: list[PlayedKernel] = []

    def make(layers: list[tuple[Tensor, Tensor]], num_heads: int) -> PlayedKernel:
        made.append(PlayedKernel(layers, num_heads))
        return made[-1]

    sizes = [16, 48, 33, 1, 22, 29, 1]
    expected = logits_by_chunks(fake_runner(model), IDS, list(range(1, 11)), sizes)
    found = logits_by_chunks(fake_runner(model, heads=make), IDS, list(range(1, 11)), sizes)
    assert torch.equal(found, expected)
    # OLMo 2 norms all heads of a row together: it keeps the separate kernels.
    assert bool(made[0].num_launches) == (model != "random:tiny-olmo2")


def test_captured_steps_have_it_too() -> None:
    plain = fake_runner("random:tiny-qwen3")
    replaying = fake_runner("random:tiny-qwen3", [1, 2, 4], heads=PlayedKernel)
    assert text(replaying, 3, 6) == text(plain, 3, 6)

"""The kernel that norms, rotates and places heads: its source run as C++ on the host, and its place in a network."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nodes.worker.cuda.heads import NAME, SOURCE, options
from nodes.worker.ops.torch.attention import HeadForm
from nodes.worker.ops.torch.kernels import TorchKernels
from tests.nodes.worker.cuda.test_device_runner import IDS, text
from tests.nodes.worker.cuda.test_flashinfer_backend import MODELS, fake_runner
from tests.nodes.worker.torch_running import logits_by_chunks

# A warp is 32 threads that wait for each other in a sum, and otherwise run as they like.
SHIM = """
#include <barrier>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>
#define __device__
#define __global__
struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx;
static Index blockDim;
static float shared[32];
static std::barrier<> *all;
static float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
static unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
static float rsqrtf(float x) { return 1 / std::sqrt(x); }
static float __shfl_xor_sync(unsigned, float x, int step)
{
    const int lane = threadIdx.x % 32;
    shared[lane] = x;
    all->arrive_and_wait();
    const float found = shared[lane ^ step];
    all->arrive_and_wait();
    return found;
}
"""

LAUNCH = """
extern "C" void launch(
    int num_warps, bits *rows, long long row_stride, int num_rows, const int *positions, const int *pages,
    const int *offsets, int num_q, int num_kv, const bits *q_weight, const bits *k_weight, float q_eps, float k_eps,
    float q_scale, const float *cos_sin, bits *k_pages, bits *v_pages, long long page_stride, int slot_stride)
{
    std::barrier<> barrier(32);
    all = &barrier, blockDim.x = 32;
    std::vector<std::thread> lanes;
    for (unsigned lane = 0; lane < 32; lane++)
        lanes.emplace_back([=] {
            threadIdx.x = lane;
            for (blockIdx.x = 0; blockIdx.x < (unsigned)num_warps; blockIdx.x++)
                kvmesh_place_heads(rows, row_stride, num_rows, positions, pages, offsets, num_q, num_kv, q_weight,
                                   k_weight, q_eps, k_eps, q_scale, cos_sin, k_pages, v_pages, page_stride,
                                   slot_stride);
        });
    for (auto &lane : lanes)
        lane.join();
}
"""
NUM_ROWS, NUM_Q, NUM_KV, PAGE = 5, 4, 2, 16

Launch = Callable[..., None]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Launch]:
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    folder = tmp_path_factory.mktemp("heads")

    def compile_for(head_dim: int) -> Launch:
        source, library = folder / f"{head_dim}.cpp", folder / f"{head_dim}.so"
        source.write_text(SHIM + SOURCE + LAUNCH)
        words = ["g++", "-O1", "-shared", "-fPIC", "-pthread", *options(head_dim), "-std=c++20"]
        subprocess.run([*words, "-o", str(library), str(source)], check=True)
        launch = ctypes.CDLL(str(library)).launch
        pointer, number, wide, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_float
        launch.argtypes = [
            number, pointer, wide, number, pointer, pointer, pointer, number, number, pointer, pointer, real, real,
            real, pointer, pointer, pointer, wide, number,
        ]  # fmt: skip
        return launch

    return compile_for


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
def test_the_kernel_does_what_four_operations_do(compiled: Callable[[int], Launch], head_dim: int) -> None:
    launch = compiled(head_dim)
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
            NUM_ROWS * (NUM_Q + 2 * NUM_KV) + 3, heads.data_ptr(), heads.stride(0), NUM_ROWS, positions.data_ptr(),
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


@pytest.mark.parametrize(
    ("model", "merged"),
    [*((model, False) for model in (*MODELS, "random:tiny-olmo2", "random:tiny-gemma3")), ("random:tiny-qwen3", True)],
)
def test_a_network_gives_the_same_with_it(model: str, merged: bool) -> None:
    made: list[PlayedKernel] = []

    def make(layers: list[tuple[Tensor, Tensor]], num_heads: int) -> PlayedKernel:
        made.append(PlayedKernel(layers, num_heads))
        return made[-1]

    sizes = [16, 48, 33, 1, 22, 29, 1]
    expected = logits_by_chunks(fake_runner(model, merged=merged), IDS, list(range(1, 11)), sizes)
    found = logits_by_chunks(fake_runner(model, merged=merged, heads=make), IDS, list(range(1, 11)), sizes)
    assert torch.equal(found, expected)
    # OLMo 2 norms all heads of a row together: it keeps the separate kernels.
    assert bool(made[0].num_launches) == (model != "random:tiny-olmo2")


def test_captured_steps_have_it_too() -> None:
    plain = fake_runner("random:tiny-qwen3")
    replaying = fake_runner("random:tiny-qwen3", [1, 2, 4], heads=PlayedKernel)
    assert text(replaying, 3, 6) == text(plain, 3, 6)

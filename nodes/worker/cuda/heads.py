"""One kernel for what lies between a layer's joint product and its attention: norms of heads, rotation, and writing KV.

Four kernels of FlashInfer do the same. None has more to do than a launch takes: at batch 1 on an H100 they were 0.20 of
the 1.52 ms of a decode step of Qwen3-0.6B, besides the gaps before each, and steps that are not captured pay the host
for each call. Here a warp takes one head of one row, so that a norm is a sum over a warp, and every lane holds both
halves of what rotates together. Rounding to bfloat16 is where those kernels round.

CuPy compiles and launches it; `flashinfer_plans` owns a worker's. The source is also tested as C++ on the host.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from torch import Tensor

from nodes.worker.cuda.own_kernels import BFLOAT16, NUM_THREADS, WARP, Launcher, load_cupy, not_compiled, pointer
from nodes.worker.ops.torch.attention import HeadForm

NAME: Final = "kvmesh_place_heads"

SOURCE: Final = (
    BFLOAT16
    + """
extern "C" __global__ void kvmesh_place_heads(
    bits *rows, long long row_stride, int num_rows,
    const int *positions, const int *write_pages, const int *write_offsets,
    int num_q, int num_kv, const bits *q_weight, const bits *k_weight, float q_eps, float k_eps, float q_scale,
    const float *cos_sin, bits *k_pages, bits *v_pages, long long page_stride, int slot_stride)
{
    const int middle = HEAD_DIM / 2, each = middle / 32;
    const int lane = threadIdx.x % 32, num_heads = num_q + 2 * num_kv;
    const long long warp = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const long long row = warp / num_heads;
    const int head = (int)(warp % num_heads);
    // A warp as a whole, so that its sum below has all of its lanes.
    if (row >= num_rows)
        return;
    bits *at = rows + row * row_stride + head * HEAD_DIM + lane * each;
    float a[each], b[each];
    for (int i = 0; i < each; i++)
        a[i] = wide(at[i]), b[i] = wide(at[middle + i]);
    if (head < num_q + num_kv) {
        const bits *weight = head < num_q ? q_weight : k_weight;
        if (weight) {
            float sum = 0;
            for (int i = 0; i < each; i++)
                sum += a[i] * a[i] + b[i] * b[i];
            for (int step = 16; step; step /= 2)
                sum += __shfl_xor_sync(0xffffffffu, sum, step);
            const float by = rsqrtf(sum / HEAD_DIM + (head < num_q ? q_eps : k_eps));
            for (int i = 0; i < each; i++) {
                a[i] = rounded(a[i] * by * wide(weight[lane * each + i]));
                b[i] = rounded(b[i] * by * wide(weight[middle + lane * each + i]));
            }
        }
        const float *angles = cos_sin + (long long)positions[row] * HEAD_DIM + lane * each;
        for (int i = 0; i < each; i++) {
            const float first = a[i] * angles[i] - b[i] * angles[middle + i];
            const float second = b[i] * angles[i] + a[i] * angles[middle + i];
            a[i] = rounded(first), b[i] = rounded(second);
            if (head < num_q && q_scale != 1)
                a[i] = rounded(a[i] * q_scale), b[i] = rounded(b[i] * q_scale);
        }
        for (int i = 0; i < each; i++)
            at[i] = narrow(a[i]), at[middle + i] = narrow(b[i]);
    }
    if (head < num_q)
        return;
    const int is_value = head >= num_q + num_kv, number = head - num_q - is_value * num_kv;
    bits *to = (is_value ? v_pages : k_pages) + write_pages[row] * page_stride
        + (long long)write_offsets[row] * slot_stride + number * HEAD_DIM + lane * each;
    for (int i = 0; i < each; i++)
        to[i] = narrow(a[i]), to[middle + i] = narrow(b[i]);
}
"""
)


def options(head_dim: int) -> tuple[str, ...]:
    """The compiler's options for heads of 64, 128 or 256."""
    return ("--std=c++17", f"-DHEAD_DIM={head_dim}")


class HeadsKernel:
    """The kernel for one pool, on the current device. Raises what CuPy raises if it cannot be compiled.

    `layers` are the pages of keys and of values of each layer, `[pages, page_size, kv_heads, head_dim]` in bfloat16,
    with the same strides in all.
    """

    def __init__(self, cupy: Any, layers: Sequence[tuple[Tensor, Tensor]], num_heads: int) -> None:
        first = layers[0][0]
        num_kv, dim = first.shape[2:]
        self._launcher = Launcher(cupy, first.device)
        self._of_layer: dict[int, tuple[Any, ...]] = {}
        self._kernel = cupy.RawKernel(SOURCE, NAME, options=options(dim))
        self._kernel.compile()
        self._dim, self._num_heads = dim, num_heads + 2 * num_kv
        self._shape = np.int32(num_heads), np.int32(num_kv)
        self._strides = np.int64(first.stride(0)), np.int32(first.stride(1))
        self._pages = [(np.uint64(k.data_ptr()), np.uint64(v.data_ptr())) for k, v in layers]

    def takes(self, form: HeadForm) -> bool:
        """Whether norms are over single heads; some models have them over all heads of a row."""
        return all(one is None or one.shape[0] == self._dim for one in (form.q_weight, form.k_weight))

    def launch(
        self, layer: int, heads: Tensor, form: HeadForm, positions: Tensor, write_pages: Tensor, write_offsets: Tensor
    ) -> None:
        """`heads` is `[rows, heads + 2 * kv_heads, head_dim]`, queries first, then keys and values: overwritten.

        The others are int32 `[rows]`. Put into torch's current stream, which may be capturing.
        """
        num_rows = heads.shape[0]
        num_threads = num_rows * self._num_heads * WARP
        arguments = (
            pointer(heads), np.int64(heads.stride(0)), np.int32(num_rows),
            pointer(positions), pointer(write_pages), pointer(write_offsets),
            *(self._of_layer.get(layer) or self._constants(layer, form)),
        )  # fmt: skip
        self._launcher.launch(self._kernel, -(-num_threads // NUM_THREADS), arguments)

    def _constants(self, layer: int, form: HeadForm) -> tuple[Any, ...]:
        """Kept: making them took longer than the launch."""
        found = (
            *self._shape, pointer(form.q_weight), pointer(form.k_weight),
            np.float32(form.q_eps), np.float32(form.k_eps), np.float32(form.q_scale), pointer(form.cos_sin),
            *self._pages[layer], *self._strides,
        )  # fmt: skip
        self._of_layer[layer] = found
        return found


def load_heads_kernel(layers: Sequence[tuple[Tensor, Tensor]], num_heads: int) -> HeadsKernel:
    """The kernel through CuPy, which a worker has loaded to map its pool. Raises BackendMissing if that cannot be."""
    what = "that norms and rotates heads"
    cupy = load_cupy(what)
    try:
        return HeadsKernel(cupy, layers, num_heads)
    # CuPy raises what NVRTC, the loader or the driver say.
    except Exception as error:
        raise not_compiled(what, error) from error

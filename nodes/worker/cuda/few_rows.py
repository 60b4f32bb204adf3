"""One kernel for a product of few rows, with the norm before it and the activation after it.

A decode step of one sequence reads each weight once, and nothing else of it takes long: it is as fast as memory if
nothing comes between. cuBLAS reads at 2.8 of an H100's 3.0 TB/s where outputs are many, but at 2.4 where it splits the
inner dimension and adds up in a second kernel, and each norm and activation is a kernel of 2 to 3 us besides. Here a
warp (or several, `split`) takes an output and reads its weights from end to end, 16 bytes per lane. Loads begin before
the norm is computed, by every block for itself: its rows are in the L2 cache by then, while the weights come from
memory. Blocks that stay and take one output after the other, so as to norm once, were not faster.

Gate and up are read side by side, so that their activation needs no kernel. Hidden states with something pending are
added up by all blocks, and written by the first, to a new place: others may still read the old one. Rounding to
bfloat16 is where separate kernels round. A row's bits do not depend on the number of rows.

CuPy compiles and launches it; `DeviceNetwork` decides when. The source is also tested as C++ on the host.
"""

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from nodes.models.parts import Activation
from nodes.worker.cuda.own_kernels import BFLOAT16, NUM_THREADS, WARP, Launcher, load_cupy, not_compiled, pointer
from nodes.worker.ops.torch.few_rows import FewRows
from nodes.worker.ops.torch.hidden import Unnormed

NAME: Final = "kvmesh_few_rows"
MOST_ROWS: Final = 2
"""Of more rows the multiplications, plain ones here, and the rows' way through the first cache take longer."""
MOST_BYTES_OF_TWO: Final = 16 << 20
"""Of a weight that two rows are multiplied with: cuBLAS took 1.0 to 1.3 times as long for 4 to 12 MiB (2.9 times where
it splits), but 0.74 to 0.96 times for 32 MiB and more (H200)."""
MOST_SHARED: Final = 47 << 10
"""Bytes of normed rows that a block holds: with its sums less than the 48 KiB that need no consent of a device."""
_NUM_WARPS: Final = NUM_THREADS // WARP
_VECTOR: Final = 8
"""Numbers in a load of 16 bytes."""
_ACTIVATIONS: Final[dict[Activation | None, int]] = {None: 0, "silu": 1, "gelu_tanh": 2}

STREAMED: Final = """
// Past the first cache, where the rows are: a weight is read once. Volatile, because the compiler would otherwise put
// these loads behind the norm, which waits for others.
static __device__ uint4 streamed(const uint4 *at)
{
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at));
    return x;
}
"""

SOURCE: Final = """
#define NUM_WARPS 8
#define NUM_WEIGHTS (ACTIVATION ? 2 : 1)

static __device__ float low(unsigned pair) { return __uint_as_float(pair << 16); }
static __device__ float high(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

static __device__ float summed(float x)
{
    for (int step = 16; step; step /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

static __device__ unsigned added(unsigned a, unsigned b)
{
    return (unsigned)narrow(low(a) + low(b)) | (unsigned)narrow(high(a) + high(b)) << 16;
}

static __device__ float squares(unsigned pair) { return low(pair) * low(pair) + high(pair) * high(pair); }

static __device__ unsigned normed(unsigned x, float by, unsigned weight)
{
    return (unsigned)narrow(low(x) * by * low(weight)) | (unsigned)narrow(high(x) * by * high(weight)) << 16;
}

static __device__ float activated(float gate)
{
    // GELU's tanh form is x * sigmoid(u) with this u.
    const float u = ACTIVATION == 1 ? gate : 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
    return gate / (1 + expf(-u));
}

extern "C" __global__ void __launch_bounds__(NUM_WARPS * 32) kvmesh_few_rows(
    const bits *weight, const bits *bias, int num_out, int vectors, int split,
    const bits *x, const bits *pending, const bits *norm_weight, float eps, bits *sums_to, bits *out)
{
    extern __shared__ uint4 own[];
    __shared__ float parts[NUM_WARPS][NUM_WEIGHTS * ROWS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, step = 32 * split;
    const int output = blockIdx.x * (NUM_WARPS / split) + warp / split;
    const uint4 *from[NUM_WEIGHTS];
    for (int w = 0; w < NUM_WEIGHTS; w++)
        from[w] = (const uint4 *)weight + (long long)(output + w * num_out) * vectors;
    // A warp without an output has no vectors either, but takes part in what the block does together.
    const int end = output < num_out ? vectors : 0;
    int i = warp % split * 32 + lane;
    uint4 held[DEPTH][NUM_WEIGHTS];
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
#pragma unroll
        for (int w = 0; w < NUM_WEIGHTS; w++)
            if (i + d * step < end)
                held[d][w] = streamed(from[w] + i + d * step);

#if HAS_NORM
    float square[ROWS];
#pragma unroll
    for (int m = 0; m < ROWS; m++) {
        square[m] = 0;
        for (int j = threadIdx.x; j < vectors; j += NUM_WARPS * 32) {
            uint4 a = ((const uint4 *)x)[m * vectors + j];
            if (pending) {
                const uint4 b = ((const uint4 *)pending)[m * vectors + j];
                a.x = added(a.x, b.x), a.y = added(a.y, b.y), a.z = added(a.z, b.z), a.w = added(a.w, b.w);
                if (blockIdx.x == 0)
                    ((uint4 *)sums_to)[m * vectors + j] = a;
            }
            own[m * vectors + j] = a;
            square[m] += squares(a.x) + squares(a.y) + squares(a.z) + squares(a.w);
        }
        square[m] = summed(square[m]);
        if (lane == 0)
            parts[warp][m] = square[m];
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < ROWS; m++) {
        float sum = 0;
        for (int other = 0; other < NUM_WARPS; other++)
            sum += parts[other][m];
        const float by = rsqrtf(sum / (vectors * 8) + eps);
        // Each thread norms what it has written itself.
        for (int j = threadIdx.x; j < vectors; j += NUM_WARPS * 32) {
            const uint4 w = ((const uint4 *)norm_weight)[j];
            uint4 a = own[m * vectors + j];
            a.x = normed(a.x, by, w.x), a.y = normed(a.y, by, w.y);
            a.z = normed(a.z, by, w.z), a.w = normed(a.w, by, w.w);
            own[m * vectors + j] = a;
        }
    }
    __syncthreads();
#endif
    const uint4 *rows = HAS_NORM ? own : (const uint4 *)x;

    float sums[NUM_WEIGHTS][ROWS] = {};
    while (true) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const int j = i + d * step;
            if (j < end) {
#pragma unroll
                for (int m = 0; m < ROWS; m++) {
                    const uint4 a = rows[m * vectors + j];
#pragma unroll
                    for (int w = 0; w < NUM_WEIGHTS; w++) {
                        const uint4 b = held[d][w];
                        float sum = low(a.x) * low(b.x);
                        sum += high(a.x) * high(b.x), sum += low(a.y) * low(b.y), sum += high(a.y) * high(b.y);
                        sum += low(a.z) * low(b.z), sum += high(a.z) * high(b.z), sum += low(a.w) * low(b.w);
                        sums[w][m] += sum + high(a.w) * high(b.w);
                    }
                }
            }
        }
        i += DEPTH * step;
        if (i - lane >= end)
            break;
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
#pragma unroll
            for (int w = 0; w < NUM_WEIGHTS; w++)
                if (i + d * step < end)
                    held[d][w] = streamed(from[w] + i + d * step);
    }

    for (int w = 0; w < NUM_WEIGHTS; w++)
        for (int m = 0; m < ROWS; m++)
            sums[w][m] = summed(sums[w][m]);
    if (split > 1) {
        // The sums of the norm have been read by all: there is a barrier behind that.
        if (lane == 0)
            for (int w = 0; w < NUM_WEIGHTS; w++)
                for (int m = 0; m < ROWS; m++)
                    parts[warp][w * ROWS + m] = sums[w][m];
        __syncthreads();
        if (lane == 0 && warp % split == 0)
            for (int other = 1; other < split; other++)
                for (int w = 0; w < NUM_WEIGHTS; w++)
                    for (int m = 0; m < ROWS; m++)
                        sums[w][m] += parts[warp + other][w * ROWS + m];
    }
    if (lane || warp % split || output >= num_out)
        return;
    for (int w = 0; bias && w < NUM_WEIGHTS; w++)
        for (int m = 0; m < ROWS; m++)
            sums[w][m] += wide(bias[output + w * num_out]);
    for (int m = 0; m < ROWS; m++)
#if ACTIVATION
        out[m * num_out + output] = narrow(activated(rounded(sums[0][m])) * rounded(sums[1][m]));
#else
        out[m * num_out + output] = narrow(sums[0][m]);
#endif
}
"""


def options(num_rows: int, *, has_norm: bool, activation: Activation | None) -> tuple[str, ...]:
    """The compiler's options for one variant."""
    # Loads of 16 bytes that a lane has in flight. With 8 a block has so many registers that three fit where four did:
    # 3.3 in place of 2.6 TB/s for 48 MiB on an H200, and less with 2.
    depth = 4
    kind = _ACTIVATIONS[activation]
    return (
        "--std=c++17", f"-DROWS={num_rows}", f"-DHAS_NORM={int(has_norm)}", f"-DACTIVATION={kind}", f"-DDEPTH={depth}",
    )  # fmt: skip


def split_of(num_out: int, num_in: int, num_processors: int) -> int:
    """Warps that share an output: as many as give each multiprocessor 32 warps, and each warp three loads or more.

    With 32 in place of 16 a product of 4,096 by 12,288 took 26.9 us in place of 29.6 on an H200, 1,024 by 3,072 3.9 in
    place of 4.5; warps of two loads each took longer than half as many of four.
    """
    split = 1
    while split < _NUM_WARPS and num_out * split < 32 * num_processors and num_in >= 2 * split * WARP * _VECTOR * 3:
        split *= 2
    return split


class FewRowsKernel(FewRows):
    """The kernel on the current device. Raises what CuPy raises if it cannot be compiled."""

    def __init__(self, cupy: Any, device: torch.device) -> None:
        self._cupy = cupy
        self._launcher = Launcher(cupy, device)
        properties = cupy.cuda.runtime.getDeviceProperties(device.index or 0)
        self._num_processors = int(properties["multiProcessorCount"])
        self._kernels: dict[tuple[str, ...], Any] = {}
        # Now, so that a compiler that is missing is found at the start.
        self._kernel(options(1, has_norm=False, activation=None))

    @override
    def takes(self, weight: Tensor, num_rows: int, activation: Activation | None = None) -> bool:
        return (
            (num_rows == 1 or (num_rows == MOST_ROWS and weight.nbytes <= MOST_BYTES_OF_TWO))
            and weight.dtype == torch.bfloat16
            and weight.is_contiguous()
            and not weight.shape[1] % _VECTOR
            and not weight.data_ptr() % 16
            and activation in _ACTIVATIONS
        )

    @override
    def takes_norm(self, num_rows: int, num_in: int) -> bool:
        # Every block norms all rows: for two that takes longer than a kernel that does it once.
        return num_rows == 1 and num_in * 2 <= MOST_SHARED

    @override
    def product(
        self, x: Tensor | Unnormed, weight: Tensor, bias: Tensor | None, activation: Activation | None = None
    ) -> Tensor:
        norm, rows = (x, x.hidden.rows) if isinstance(x, Unnormed) else (None, x)
        # The kernel takes rows that lie side by side; only a part of a joint product does not.
        rows = rows.contiguous()
        num_rows, num_in = rows.shape
        num_out = weight.shape[0] // (2 if activation else 1)
        out = torch.empty(num_rows, num_out, dtype=rows.dtype, device=rows.device)
        pending = None if norm is None or norm.hidden.pending is None else norm.hidden.pending.contiguous()
        # Never in place: a block that begins late reads the rows when others have written their sums.
        sums = None if pending is None else torch.empty_like(rows)
        split = split_of(num_out, num_in, self._num_processors)
        arguments = (
            pointer(weight), pointer(bias), np.int32(num_out), np.int32(num_in // _VECTOR), np.int32(split),
            pointer(rows), pointer(pending), pointer(norm and norm.weight), np.float32(norm.eps if norm else 0),
            pointer(sums), pointer(out),
        )  # fmt: skip
        kernel = self._kernel(options(num_rows, has_norm=norm is not None, activation=activation))
        num_blocks = -(-num_out // (_NUM_WARPS // split))
        self._launcher.launch(kernel, num_blocks, arguments, rows.nbytes if norm is not None else 0)
        # Known before the kernel has run: whatever reads them is behind it in the stream.
        if norm is not None and sums is not None:
            norm.hidden.rows, norm.hidden.pending = sums, None
        return out

    def _kernel(self, compiled_with: tuple[str, ...]) -> Any:
        kernel = self._kernels.get(compiled_with)
        if kernel is None:
            kernel = self._cupy.RawKernel(BFLOAT16 + STREAMED + SOURCE, NAME, options=compiled_with)
            kernel.compile()
            self._kernels[compiled_with] = kernel
        return kernel


def load_few_rows(device: torch.device) -> FewRowsKernel:
    """The kernel through CuPy. Raises BackendMissing if that cannot be."""
    what = "for products of few rows"
    cupy = load_cupy(what)
    try:
        return FewRowsKernel(cupy, device)
    # CuPy raises what NVRTC, the loader or the driver say.
    except Exception as error:
        raise not_compiled(what, error) from error

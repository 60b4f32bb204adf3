"""Our own CUDA kernels compiled as C++: a block is threads that wait for each other where the source says so."""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

# A warp is 32 threads that wait for each other in a sum, and otherwise run as they like.
_SHIM = """
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>
#define __device__
#define __global__
#define __launch_bounds__(number)
#define __shared__ static
struct Index { unsigned x; };
struct uint4 { unsigned x, y, z, w; };
static thread_local Index threadIdx, blockIdx;
static Index blockDim, gridDim;
static float shuffled[32][32];
static uint4 dynamic[1 << 14];
static std::vector<std::unique_ptr<std::barrier<>>> warps;
static std::barrier<> *block;
static float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
static unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
static float rsqrtf(float x) { return 1 / std::sqrt(x); }
static void __syncthreads() { block->arrive_and_wait(); }
static float __shfl_xor_sync(unsigned, float x, int step)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    shuffled[warp][lane] = x;
    warps[warp]->arrive_and_wait();
    const float found = shuffled[warp][lane ^ step];
    warps[warp]->arrive_and_wait();
    return found;
}
"""

_LAUNCH = """
extern "C" void launch(int num_blocks, int num_threads, %(parameters)s)
{
    std::barrier<> all(num_threads);
    block = &all, blockDim.x = num_threads, gridDim.x = num_blocks;
    warps.clear();
    for (int i = 0; i < num_threads / 32; i++)
        warps.push_back(std::make_unique<std::barrier<>>(32));
    std::vector<std::thread> threads;
    for (int thread = 0; thread < num_threads; thread++)
        threads.emplace_back([=] {
            threadIdx.x = thread;
            for (blockIdx.x = 0; blockIdx.x < (unsigned)num_blocks; blockIdx.x++) {
                %(kernel)s(%(names)s);
                // What a block shares is one memory for all blocks here.
                __syncthreads();
            }
        });
    for (auto &thread : threads)
        thread.join();
}
"""


def compiled(source: str, kernel: str, options: Sequence[str], folder: Path) -> "ctypes._NamedFuncPointer":
    """`launch(num_blocks, num_threads, …)` of the kernel, whose parameters are read off its source."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    begin = source.index(f" {kernel}(") + len(kernel) + 2
    parameters = " ".join(source[begin : source.index(")", begin)].split())
    names = [one.split()[-1].lstrip("*") for one in parameters.split(",")]
    number = len(list(folder.iterdir()))
    path, library = folder / f"{number}.cpp", folder / f"{number}.so"
    launch = _LAUNCH % {"parameters": parameters, "kernel": kernel, "names": ", ".join(names)}
    path.write_text(_SHIM + source.replace("extern __shared__ uint4 own[];", "uint4 *own = dynamic;") + launch)
    words = ["g++", "-O1", "-w", "-shared", "-fPIC", "-pthread", *options, "-std=c++20"]
    subprocess.run([*words, "-o", str(library), str(path)], check=True)
    found = ctypes.CDLL(str(library)).launch
    found.argtypes = [ctypes.c_int, ctypes.c_int, *(_type_of(one) for one in parameters.split(","))]
    return found


def _type_of(parameter: str) -> type:
    if "*" in parameter:
        return ctypes.c_void_p
    return {"int": ctypes.c_int, "long": ctypes.c_longlong, "float": ctypes.c_float}[parameter.split()[-2]]

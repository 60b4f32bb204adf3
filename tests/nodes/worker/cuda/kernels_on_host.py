"""Our own CUDA kernels compiled as C++: a block is threads that wait for each other where the source says so."""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

# A warp is 32 threads that wait for each other in a sum, and otherwise run as they like. Threads of POSIX: a compiler
# takes 0.1 s for them, and 0.6 s for those of C++ with their barriers.
_SHIM = """
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
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
static pthread_barrier_t warps[32], block;
static float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
static unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
static float rsqrtf(float x) { return 1 / std::sqrt(x); }
static void __syncthreads() { pthread_barrier_wait(&block); }
static float __shfl_xor_sync(unsigned, float x, int step)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    shuffled[warp][lane] = x;
    pthread_barrier_wait(&warps[warp]);
    const float found = shuffled[warp][lane ^ step];
    pthread_barrier_wait(&warps[warp]);
    return found;
}
template <class Body> struct Started { const Body *body; int number; };
template <class Body> static void *run(void *given)
{
    auto *one = (Started<Body> *)given;
    (*one->body)(one->number);
    return nullptr;
}
template <class Body> static void in_threads(int count, const Body &body)
{
    pthread_t threads[1024];
    Started<Body> started[1024];
    for (int i = 0; i < count; i++) {
        started[i] = {&body, i};
        if (pthread_create(&threads[i], nullptr, run<Body>, &started[i]))
            abort();
    }
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], nullptr);
}
"""

_LAUNCH = """
extern "C" void launch(int num_blocks, int num_threads, %(parameters)s)
{
    blockDim.x = num_threads, gridDim.x = num_blocks;
    pthread_barrier_init(&block, nullptr, num_threads);
    for (auto &warp : warps)
        pthread_barrier_init(&warp, nullptr, 32);
    in_threads(num_threads, [=](int thread) {
        threadIdx.x = thread;
        for (blockIdx.x = 0; blockIdx.x < (unsigned)num_blocks; blockIdx.x++) {
            %(kernel)s(%(names)s);
            // What a block shares is one memory for all blocks here.
            __syncthreads();
        }
    });
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

// The C interface of the kernels, called by ctypes (builds.py declares the same signatures).
//
// No C++ library, no exceptions, no Python: this needs only pthreads and Linux. Pointers are to memory of the caller
// that lives until the call returns. Built once for each instruction set (sources.py), with floating-point contraction
// off: fused operations are written out.
#include <sys/mman.h>

#include "draw.h"
#include "program.h"

#ifndef KVMESH_SOURCES
#error "the build says which sources these are: see setup.py"
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

static constexpr int64_t HUGE = 2 << 20;

INLINE int64_t whole_pages(int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

// Digest of the sources that this was built from.
EXPORT const char* kvmesh_sources() { return KVMESH_SOURCES; }

// How many threads compute, the caller included.
EXPORT void kvmesh_set_threads(int threads) {
  __atomic_store_n(&pool.threads, threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads, __ATOMIC_RELAXED);
}

// Zeroed memory, in huge pages as far as it fills them: reading weights from them is a third faster. Null: no memory.
EXPORT void* kvmesh_allocate(int64_t bytes) {
  const int64_t kept = whole_pages(bytes);
  char* found = (char*)mmap(nullptr, kept + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) return nullptr;
  char* aligned = (char*)(((uintptr_t)found + HUGE - 1) / HUGE * HUGE);
  if (aligned > found) munmap(found, aligned - found);
  munmap(aligned + kept, HUGE - (aligned - found));
  // The rest stays in small pages: a huge one for each little matrix would be mostly waste.
  if (kept >= HUGE) madvise(aligned, kept / HUGE * HUGE, MADV_HUGEPAGE);
  return aligned;
}

EXPORT void kvmesh_free(void* memory, int64_t bytes) { munmap(memory, whole_pages(bytes)); }

// Bytes that a packed weight of n outputs and k inputs takes, or two of them for a gated layer of n outputs.
EXPORT int64_t kvmesh_packed_bytes(int dtype, int is_int8, int is_gated, int64_t n, int64_t k) {
  return num_panels(n, is_gated) * with_weights(dtype, is_int8, [&](auto type) { return panel_bytes<decltype(type)>(k); });
}

// Packs a weight. Returns 0, or 1 if a number that is to become int8 is not finite.
EXPORT int kvmesh_pack(
    int dtype, int is_int8, const void* weight, const void* second, int64_t n, int64_t k, void* packed) {
  int has_bad = 0;
  run_job(run_pack, PackCall{weight, second, packed, &has_bad, n, k, dtype, is_int8}, 1);
  return has_bad;
}

// Bytes of each number in the rows that products of this dtype read and write.
EXPORT int kvmesh_row_bytes(int dtype) {
  return dtype == BFLOAT16 ? sizeof(RowOf<Bfloat16>) : sizeof(RowOf<float>);
}

EXPORT void kvmesh_linear(
    int dtype, int is_int8, int epilogue, const void* x, const void* weight, const float* bias, const void* other,
    void* y, int64_t rows, int64_t n, int64_t k) {
  run_job(run_linear, LinearCall{x, weight, bias, other, y, rows, n, k, dtype, is_int8, epilogue}, 1);
}

EXPORT void kvmesh_norm(
    int dtype, const void* x, const float* weight, void* y, int64_t rows, int64_t n, float eps) {
  for (int64_t row = 0; row < rows; row++) {
    const int64_t at = row * n;
    if (dtype == BFLOAT16)
      norm_row((const Bfloat16*)x + at, weight, (Bfloat16*)y + at, n, eps);
    else
      norm_row((const float*)x + at, weight, (float*)y + at, n, eps);
  }
}

// Computes operations first .. last - 1 of a step of a model. The step's columns must not change until this returns.
EXPORT void kvmesh_step(Program* program, const Step* step, int first, int last) {
  compute_step(*program, *step, first, last);
}

// Bytes that kvmesh_rows needs for rows of so many logits, with as many threads as compute now.
EXPORT int64_t kvmesh_rows_scratch(int64_t size) {
  return RowScratch::bytes(size) * __atomic_load_n(&pool.threads, __ATOMIC_RELAXED);
}

// Draws from rows of logits, and reads their probabilities. `scratch` as above, aligned to 8 bytes.
EXPORT void kvmesh_rows(const RowsCall* call) { run_job(run_tasks, *call, 1); }

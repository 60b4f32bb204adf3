// The peak that a prefill is compared with: a loop of nothing but multiply-adds in registers, as one build multiplies.
//
// Compiled by benchmarks/long_prompts.py, with the flags of that build.
#include "product.h"

constexpr int VECTORS = vectors_of<TILE_ROWS>();

template <class Add>
INLINE void repeat(float* to, int64_t steps, Add add) {
  Floats sums[TILE_ROWS][VECTORS] = {};
  // Otherwise the compiler sees that all sums are equal, and computes one.
  for (auto& row : sums)
    for (auto& sum : row) asm volatile("" : "+x"(sum));
  for (int64_t step = 0; step < steps; step++) UNROLL for (int r = 0; r < TILE_ROWS; r++)
    UNROLL for (int j = 0; j < VECTORS; j++) sums[r][j] = add(sums[r][j]);
  Floats total = {};
  for (int r = 0; r < TILE_ROWS; r++)
    for (int j = 0; j < VECTORS; j++) total = total + sums[r][j];
  store(to, total);
}

// Each computes so many steps, and says how many multiplications and additions they were: two for each multiply-add.
extern "C" int64_t multiply_adds(float* to, int64_t steps) {
  Floats by = splat(0.5f);
  asm volatile("" : "+x"(by));
  repeat(to, steps, [&](Floats sum) { return multiply_add(by, by, sum); });
  return 2 * TILE_ROWS * VECTORS * LANES * steps;
}

// Of pairs of bfloat16, four for each lane; 0 without an instruction for them.
extern "C" int64_t multiply_add_pairs(float* to, int64_t steps) {
#ifdef HAS_PAIRS
  Ints pairs = splat_bits(0x3f003f00);
  asm volatile("" : "+x"(pairs));
  repeat(to, steps, [&](Floats sum) { return (Floats)_mm512_dpbf16_ps(sum, (__m512bh)pairs, (__m512bh)pairs); });
  return 4 * TILE_ROWS * VECTORS * LANES * steps;
#else
  return 0;
#endif
}

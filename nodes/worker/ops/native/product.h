// Products of a few rows with 64 columns of a packed matrix, in registers: what linear layers and attention are made of.
//
// A packed panel is 64 columns of the matrix, step after step of 256 bytes: one k of float32, or a pair of k of
// bfloat16, column by column. Each output has one accumulator, which takes its products in the order of k however many
// rows and columns are computed with it; between blocks of k it is kept in memory as float32, which is exact. So a
// row's bits cannot depend on its neighbours, and rows need no padding.
#pragma once
#include "simd.h"

constexpr int PANEL = 64;
constexpr int STEP_BYTES = PANEL * 4;
constexpr int TILE_ROWS = 6;

struct Float32 {
  typedef float Scalar;
  typedef float Factor;
  static constexpr int K_PER_STEP = 1;
};

// `Factor` is what rows are multiplied as: without an instruction for pairs, widening them once for a whole tile saves
// widening each number again for every few columns.
struct PairsOfBfloat16 {
  typedef Bfloat16 Scalar;
#if defined(__AVX512BF16__) && LANES == 16
  typedef Bfloat16 Factor;
#else
  typedef float Factor;
#endif
  static constexpr int K_PER_STEP = 2;
};

// Vectors of columns for a tile of so many rows. With 16 registers the rows that keep the multipliers busy leave room
// for a quarter of a panel; few rows take more columns, for it needs eight sums at once to hide a multiplication's time.
template <int ROWS>
constexpr int vectors_of() {
  if (LANES == 16) return 4;
  return ROWS == 1 ? 8 : ROWS == 2 ? 4 : 2;
}

template <int ROWS, int VECTORS>
INLINE void add_step(Floats (&sums)[ROWS][VECTORS], Float32, const float* x, int64_t x_stride, const char* w) {
  Floats weights[VECTORS];
  UNROLL for (int j = 0; j < VECTORS; j++) weights[j] = load((const float*)w + j * LANES);
  UNROLL for (int r = 0; r < ROWS; r++) {
    Floats value = splat(x[r * x_stride]);
    UNROLL for (int j = 0; j < VECTORS; j++) sums[r][j] = multiply_add(weights[j], value, sums[r][j]);
  }
}

template <int ROWS, int VECTORS>
INLINE void add_step(
    Floats (&sums)[ROWS][VECTORS], PairsOfBfloat16, const PairsOfBfloat16::Factor* x, int64_t x_stride, const char* w) {
  Ints pairs[VECTORS];
  UNROLL for (int j = 0; j < VECTORS; j++) pairs[j] = load_as<Ints>(w + j * LANES * 4);
#if defined(__AVX512BF16__) && LANES == 16
  UNROLL for (int r = 0; r < ROWS; r++) {
    const Ints value = splat_bits(load_as<int32_t>(x + r * x_stride));
    UNROLL for (int j = 0; j < VECTORS; j++)
      sums[r][j] = _mm512_dpbf16_ps(sums[r][j], (__m512bh)pairs[j], (__m512bh)value);
  }
#else
  UNROLL for (int r = 0; r < ROWS; r++) {
    const Floats value = splat(x[r * x_stride]);
    UNROLL for (int j = 0; j < VECTORS; j++) sums[r][j] = multiply_add((Floats)(pairs[j] << 16), value, sums[r][j]);
  }
  const Ints upper = splat_bits((int32_t)0xffff0000);
  UNROLL for (int r = 0; r < ROWS; r++) {
    const Floats value = splat(x[r * x_stride + 1]);
    UNROLL for (int j = 0; j < VECTORS; j++)
      sums[r][j] = multiply_add((Floats)(pairs[j] & upper), value, sums[r][j]);
  }
#endif
}

// sums[rows][stride] (+)= x[rows][steps] * w; `w` is at the first column, its steps `w_stride` bytes apart.
template <class Type, int ROWS, int VECTORS>
__attribute__((noinline)) static void multiply_tile(
    const typename Type::Factor* x, int64_t x_stride, const char* w, int64_t w_stride, int64_t steps, float* sums,
    int64_t stride, bool is_first) {
  Floats tile[ROWS][VECTORS];
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int j = 0; j < VECTORS; j++)
      tile[r][j] = is_first ? Floats{} : load(sums + r * stride + j * LANES);
  for (int64_t step = 0; step < steps; step++, x += Type::K_PER_STEP, w += w_stride)
    add_step(tile, Type{}, x, x_stride, w);
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int j = 0; j < VECTORS; j++) store(sums + r * stride + j * LANES, tile[r][j]);
}

template <class Type, int ROWS>
static void multiply_rows(
    const typename Type::Factor* x, int64_t x_stride, const char* w, int64_t w_stride, int64_t steps, float* sums,
    int64_t stride, int num_vectors, bool is_first) {
  constexpr int MOST = vectors_of<ROWS>();
  int j = 0;
  for (; j + MOST <= num_vectors; j += MOST)
    multiply_tile<Type, ROWS, MOST>(
        x, x_stride, w + j * LANES * 4, w_stride, steps, sums + j * LANES, stride, is_first);
  for (; j < num_vectors; j++)
    multiply_tile<Type, ROWS, 1>(x, x_stride, w + j * LANES * 4, w_stride, steps, sums + j * LANES, stride, is_first);
}

// At most TILE_ROWS rows by `num_vectors` vectors of columns.
template <class Type>
static void multiply(
    int rows, const typename Type::Factor* x, int64_t x_stride, const char* w, int64_t w_stride, int64_t steps,
    float* sums, int64_t stride, int num_vectors, bool is_first) {
#define MULTIPLY(ROWS) multiply_rows<Type, ROWS>(x, x_stride, w, w_stride, steps, sums, stride, num_vectors, is_first)
  switch (rows) {
    case 1: return MULTIPLY(1);
    case 2: return MULTIPLY(2);
    case 3: return MULTIPLY(3);
    case 4: return MULTIPLY(4);
    case 5: return MULTIPLY(5);
    default: return MULTIPLY(6);
  }
#undef MULTIPLY
}

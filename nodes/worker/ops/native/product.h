// Products of a few rows with 64 columns of a packed matrix, in registers: what linear layers and attention consist of.
//
// A packed panel is 64 columns of the matrix, step after step: a step is one k of float32, a pair of k of bfloat16 for
// each column, or one or two k of int8, with a scale for each column in front of the panel. Each output has one
// accumulator, which takes its products in the order of k however many rows and columns are computed with it; between
// blocks of k it is kept in memory as float32, which is exact. So a row's bits cannot depend on its neighbours, and
// rows need no padding.
#pragma once
#include "simd.h"

#if defined(__AVX512BF16__) && LANES == 16
#define HAS_PAIRS
#endif

constexpr int PANEL = 64;
constexpr int TILE_ROWS = 6;

// The type that rows are kept as between operations, for a model of this dtype: the type that products multiply.
// Without an instruction for pairs of bfloat16, the operation that makes rows widens them; when each product widened
// them again, for every panel, a prefill of 128 took 1.13 times as long.
template <class Scalar>
struct Rows {
  typedef Scalar Row;
};

#ifndef HAS_PAIRS
template <>
struct Rows<Bfloat16> {
  typedef Widened Row;
};
#endif

template <class Scalar>
using RowOf = typename Rows<Scalar>::Row;

// How weights lie in memory. `Scalar` is the model's dtype, `Factor` the type in which rows are multiplied, `Kernel`
// the type whose `add_step` computes, `Wide` the type of weights that several tiles of rows share: converting them once
// for all tiles is exact, so the bits are the same.
struct Float32 {
  typedef float Scalar;
  typedef float Factor;
  typedef float Weight;
  typedef Float32 Kernel;
  typedef Float32 Wide;
  static constexpr int K_PER_STEP = 1, STEP_BYTES = PANEL * 4, COLUMN_BYTES = 4, HEAD_BYTES = 0;
  static constexpr bool IS_WIDE = true;
};

struct PairsOfBfloat16 {
  typedef Bfloat16 Scalar;
  typedef PairsOfBfloat16 Kernel;
#ifdef HAS_PAIRS
  typedef Bfloat16 Factor;
  typedef PairsOfBfloat16 Wide;
  static constexpr bool IS_WIDE = true;
#else
  typedef float Factor;
  typedef Float32 Wide;
  static constexpr bool IS_WIDE = false;
#endif
  static constexpr int K_PER_STEP = 2, STEP_BYTES = PANEL * 4, COLUMN_BYTES = 4, HEAD_BYTES = 0;
};

// 64 numbers for one k after the other. Their scales are in front: 64 float32.
struct Int8 {
  typedef float Factor;
  typedef int8_t Weight;
  typedef Int8 Kernel;
  typedef Float32 Wide;
  static constexpr int K_PER_STEP = 1, STEP_BYTES = PANEL, COLUMN_BYTES = 1, HEAD_BYTES = PANEL * 4;
  static constexpr bool IS_WIDE = false;
};

template <class Row>
struct Int8Of : Int8 {
  typedef Row Scalar;
};

#ifdef HAS_PAIRS
struct PairsOfInt8 {
  typedef Bfloat16 Factor;
  typedef PairsOfInt8 Kernel;
  typedef PairsOfBfloat16 Wide;
  static constexpr int K_PER_STEP = 2, STEP_BYTES = 2 * PANEL, COLUMN_BYTES = 1, HEAD_BYTES = PANEL * 4;
  static constexpr bool IS_WIDE = false;
};

template <>
struct Int8Of<Bfloat16> : PairsOfInt8 {
  typedef Bfloat16 Scalar;
};
#endif

// Vectors of columns for a tile of so many rows. With 16 registers, enough rows to keep the multipliers busy leave room
// for a quarter of a panel; few rows take more columns, as it takes eight sums at once to hide a multiplication's time.
template <int ROWS>
constexpr int vectors_of() {
  if (LANES == 16) return 4;
  return ROWS == 1 ? 8 : ROWS == 2 ? 4 : 2;
}

template <class Type, int ROWS, int VECTORS>
INLINE void add_step(Floats (&sums)[ROWS][VECTORS], Type, const float* x, int64_t x_stride, const char* w) {
  Floats weights[VECTORS];
  UNROLL for (int j = 0; j < VECTORS; j++) weights[j] = load((const typename Type::Weight*)w + j * LANES);
  UNROLL for (int r = 0; r < ROWS; r++) {
    Floats value = splat(x[r * x_stride]);
    UNROLL for (int j = 0; j < VECTORS; j++) sums[r][j] = multiply_add(weights[j], value, sums[r][j]);
  }
}

#ifdef HAS_PAIRS
template <int ROWS, int VECTORS>
INLINE void add_pairs(
    Floats (&sums)[ROWS][VECTORS], const Bfloat16* x, int64_t x_stride, const Ints (&pairs)[VECTORS]) {
  UNROLL for (int r = 0; r < ROWS; r++) {
    const Ints value = splat_bits(load_as<int32_t>(x + r * x_stride));
    UNROLL for (int j = 0; j < VECTORS; j++)
      sums[r][j] = _mm512_dpbf16_ps(sums[r][j], (__m512bh)pairs[j], (__m512bh)value);
  }
}

template <int ROWS, int VECTORS>
INLINE void add_step(
    Floats (&sums)[ROWS][VECTORS], PairsOfBfloat16, const Bfloat16* x, int64_t x_stride, const char* w) {
  Ints pairs[VECTORS];
  UNROLL for (int j = 0; j < VECTORS; j++) pairs[j] = load_as<Ints>(w + j * LANES * 4);
  add_pairs(sums, x, x_stride, pairs);
}

// Whole numbers up to 127 are exact in bfloat16: the upper halves of their float32.
INLINE Ints pairs_of(const char* w) {
  return (Ints)(((Words)load((const int8_t*)w) >> 16) | (Words)load((const int8_t*)w + PANEL));
}

template <int ROWS, int VECTORS>
INLINE void add_step(Floats (&sums)[ROWS][VECTORS], PairsOfInt8, const Bfloat16* x, int64_t x_stride, const char* w) {
  Ints pairs[VECTORS];
  UNROLL for (int j = 0; j < VECTORS; j++) pairs[j] = pairs_of(w + j * LANES);
  add_pairs(sums, x, x_stride, pairs);
}
#else
template <int ROWS, int VECTORS>
INLINE void add_step(Floats (&sums)[ROWS][VECTORS], PairsOfBfloat16, const float* x, int64_t x_stride, const char* w) {
  Ints pairs[VECTORS];
  UNROLL for (int j = 0; j < VECTORS; j++) pairs[j] = load_as<Ints>(w + j * LANES * 4);
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
}
#endif

// Converts `steps` of a panel to its `Wide` type.
template <class Type>
static void widen(Type, const char* w, int64_t steps, char* to) {
  for (int64_t i = 0; i < steps * PANEL; i += LANES) store((float*)to + i, load((const typename Type::Weight*)w + i));
}

#ifdef HAS_PAIRS
static void widen(PairsOfInt8, const char* w, int64_t steps, char* to) {
  for (int64_t step = 0; step < steps; step++, w += 2 * PANEL)
    for (int column = 0; column < PANEL; column += LANES, to += LANES * 4) {
      const Ints pairs = pairs_of(w + column);
      memcpy(to, &pairs, sizeof pairs);
    }
}
#else
static void widen(PairsOfBfloat16, const char* w, int64_t steps, char* to) {
  const Ints upper = splat_bits((int32_t)0xffff0000);
  for (int64_t step = 0; step < steps; step++, w += PANEL * 4, to += 2 * PANEL * 4)
    UNROLL for (int column = 0; column < PANEL; column += LANES) {
      const Ints pairs = load_as<Ints>(w + column * 4);
      store((float*)to + column, (Floats)(pairs << 16));
      store((float*)to + PANEL + column, (Floats)(pairs & upper));
    }
}
#endif

// Memory that is read next: prefetched meanwhile, a little in each step.
struct Ahead {
  const char* at;
  int64_t bytes;
};

// sums[rows][stride] (+)= x[rows][steps] * w; `w` is at the first column, its steps `w_stride` bytes apart.
template <class Type, int ROWS, int VECTORS>
__attribute__((noinline)) static void multiply_tile(
    const typename Type::Factor* x, int64_t x_stride, const char* w, int64_t w_stride, int64_t steps, float* sums,
    int64_t stride, bool is_first, const char* ahead, int64_t ahead_stride) {
  Floats tile[ROWS][VECTORS];
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int j = 0; j < VECTORS; j++)
      tile[r][j] = is_first ? Floats{} : load(sums + r * stride + j * LANES);
  for (int64_t step = 0; step < steps; step++, x += Type::K_PER_STEP, w += w_stride, ahead += ahead_stride) {
    _mm_prefetch(ahead, _MM_HINT_T1);
    add_step(tile, Type{}, x, x_stride, w);
  }
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int j = 0; j < VECTORS; j++) store(sums + r * stride + j * LANES, tile[r][j]);
}

template <class Type, int ROWS>
static void multiply_rows(
    const typename Type::Factor* x, int64_t x_stride, const char* w, int64_t w_stride, int64_t steps, float* sums,
    int64_t stride, int num_vectors, bool is_first, Ahead ahead) {
  constexpr int MOST = vectors_of<ROWS>();
  // If there is nothing to prefetch, an address that is in the cache already.
  const char* next = ahead.bytes ? ahead.at : (const char*)x;
  const int64_t next_stride = ahead.bytes ? ahead.bytes * MOST / (num_vectors * steps) + 1 : 0;
  int j = 0;
  for (; j + MOST <= num_vectors; j += MOST, next += next_stride * steps)
    multiply_tile<Type, ROWS, MOST>(
        x, x_stride, w + j * LANES * Type::COLUMN_BYTES, w_stride, steps, sums + j * LANES, stride, is_first, next,
        next_stride);
  for (; j < num_vectors; j++)
    multiply_tile<Type, ROWS, 1>(
        x, x_stride, w + j * LANES * Type::COLUMN_BYTES, w_stride, steps, sums + j * LANES, stride, is_first, next, 0);
}

// At most TILE_ROWS rows by `num_vectors` vectors of columns.
template <class Type>
static void multiply(
    int rows, const typename Type::Factor* x, int64_t x_stride, const char* w, int64_t w_stride, int64_t steps,
    float* sums, int64_t stride, int num_vectors, bool is_first, Ahead ahead = {}) {
#define MULTIPLY(ROWS) \
  multiply_rows<Type, ROWS>(x, x_stride, w, w_stride, steps, sums, stride, num_vectors, is_first, ahead)
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

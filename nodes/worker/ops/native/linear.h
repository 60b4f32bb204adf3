// Linear layers: packing of a weight into panels (see product.h), and their product with what follows it fused in.
#pragma once
#include "product.h"
#include "threads.h"

constexpr int BLOCK_ROWS = 60;       // ten tiles: their sums stay in the first cache
constexpr int64_t BLOCK_STEPS = 256; // of a panel at a time, 64 KB for all of these rows

enum Dtype { FLOAT32 = 0, BFLOAT16 = 1 };
enum Epilogue { PLAIN = 0, PLUS = 1, GATED_SILU = 2, GATED_GELU = 3 };

struct LinearCall {
  const void* x;        // [rows, k]
  const void* weight;   // packed
  const float* bias;    // [n], or null; of a gated layer [2][n], the gate's first
  const void* other;    // [rows, n], of PLUS
  void* y;              // [rows, n]
  int64_t rows, n, k;
  int dtype, epilogue;
};

struct PackCall {
  const void* weight;   // [n, k]
  const void* second;   // [n, k], or null; panels then are half of the one (the gate), half of the other
  void* packed;
  int64_t n, k;
  int dtype;
};

// Outputs of a panel: a gated layer's are made of two columns each.
INLINE int panel_outputs(bool is_gated) { return is_gated ? PANEL / 2 : PANEL; }
INLINE int64_t num_panels(int64_t n, bool is_gated) {
  return (n + panel_outputs(is_gated) - 1) / panel_outputs(is_gated);
}

template <class Type>
INLINE int64_t panel_bytes(int64_t k) {
  return (k + Type::K_PER_STEP - 1) / Type::K_PER_STEP * STEP_BYTES;
}

template <class Type>
static void pack_panel(const PackCall& call, int64_t panel) {
  typedef typename Type::Scalar Scalar;
  constexpr int PER = Type::K_PER_STEP;
  const int outputs = panel_outputs(call.second);
  Scalar* to = (Scalar*)((char*)call.packed + panel * panel_bytes<Type>(call.k));
  const int64_t steps = panel_bytes<Type>(call.k) / STEP_BYTES;
  // A few columns at a time: their rows of the weight are read in order, and what is written stays in the cache.
  for (int64_t begin = 0; begin < steps; begin += 64)
    for (int column = 0; column < PANEL; column++) {
      const int64_t n = panel * outputs + column % outputs;
      const Scalar* weight = (const Scalar*)(column < outputs ? call.weight : call.second);
      for (int64_t step = begin; step < begin + 64 && step < steps; step++)
        for (int i = 0; i < PER; i++) {
          const int64_t k = step * PER + i;
          to[(step * PANEL + column) * PER + i] = n < call.n && k < call.k ? weight[n * call.k + k] : Scalar{};
        }
    }
}

// SiLU, or GELU by its tanh, which is x times the sigmoid of a cubic.
INLINE Floats activated(Floats x, bool is_gelu) {
  const Floats inner = is_gelu ? x * (1.5957691216f + 0.0713548163f * x * x) : x;
  return x / (1.0f + exponential(-inner));
}

template <class Scalar>
INLINE void finish_row(const LinearCall& call, int64_t panel, int64_t row, const float* sums) {
  const bool is_gated = call.epilogue >= GATED_SILU;
  const int outputs = panel_outputs(is_gated);
  for (int column = 0; column < outputs; column += LANES) {
    const int64_t n = panel * outputs + column, at = row * call.n + n;
    if (n >= call.n) return;
    const int count = call.n - n < LANES ? (int)(call.n - n) : LANES;
    Floats value = load(sums + column);
    if (call.bias) value = value + load_first(call.bias + n, count);
    if (is_gated) {
      Floats up = load(sums + outputs + column);
      if (call.bias) up = up + load_first(call.bias + call.n + n, count);
      value = activated(value, call.epilogue == GATED_GELU) * up;
    }
    if (call.epilogue == PLUS) value = value + load_first((const Scalar*)call.other + at, count);
    store_first((Scalar*)call.y + at, value, count);
  }
}

// Rows of x, k .. k + count - 1, as they are multiplied: in place if they can be, else in `copied`, widened or with a
// zero behind an odd end.
template <class Type>
INLINE const typename Type::Factor* factors(
    const typename Type::Scalar* x, int64_t x_stride, int rows, int64_t count, typename Type::Factor* copied,
    int64_t copied_stride) {
  if constexpr (sizeof(typename Type::Factor) == sizeof(typename Type::Scalar)) {
    for (int r = 0; r < rows; r++) {
      memcpy(copied + r * copied_stride, x + r * x_stride, count * sizeof *x);
      if (count % Type::K_PER_STEP) copied[r * copied_stride + count] = 0;
    }
  } else {
    for (int r = 0; r < rows; r++)
      for (int64_t i = 0; i < count; i += LANES) {
        const int some = count - i < LANES ? (int)(count - i) : LANES;
        store(copied + r * copied_stride + i, load_first(x + r * x_stride + i, some));
      }
  }
  return copied;
}

// Rows first_row .. last_row - 1 of `x_rows`, `[rows, k_size]`, times one panel of a packed weight; `finish(row, sums)`
// gets the 64 sums of each row.
template <class Type, class Finish>
static void multiply_panel(
    const void* x_rows, const void* packed, int64_t k_size, int64_t panel, int64_t first_row, int64_t last_row,
    Finish finish) {
  typedef typename Type::Scalar Scalar;
  typedef typename Type::Factor Factor;
  constexpr int64_t BLOCK_K = BLOCK_STEPS * Type::K_PER_STEP;
  alignas(64) float sums[BLOCK_ROWS * PANEL];
  alignas(64) Factor copied[TILE_ROWS * BLOCK_K];
  const char* weight = (const char*)packed + panel * panel_bytes<Type>(k_size);
  for (int64_t row = first_row; row < last_row; row += BLOCK_ROWS) {
    const int rows = last_row - row < BLOCK_ROWS ? (int)(last_row - row) : BLOCK_ROWS;
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t k = 0; k < k_size; k += BLOCK_K) {
      const int64_t count = k_size - k < BLOCK_K ? k_size - k : BLOCK_K;
      const bool is_in_place = sizeof(Factor) == sizeof(Scalar) && count % Type::K_PER_STEP == 0;
      for (int tile = 0; tile < tiles; tile++) {
        // Tiles of nearly equal size: of seven rows, three and four.
        const int first = rows * tile / tiles, last = rows * (tile + 1) / tiles;
        const Scalar* x = (const Scalar*)x_rows + (row + first) * k_size + k;
        multiply<Type>(
            last - first, is_in_place ? (const Factor*)x : factors<Type>(x, k_size, last - first, count, copied, BLOCK_K),
            is_in_place ? k_size : BLOCK_K, weight + k / Type::K_PER_STEP * STEP_BYTES, STEP_BYTES,
            (count + Type::K_PER_STEP - 1) / Type::K_PER_STEP, sums + first * PANEL, PANEL, PANEL / LANES, k == 0);
      }
    }
    for (int r = 0; r < rows; r++) finish(row + r, sums + r * PANEL);
  }
}

// Into how many items a panel is cut. It is read once for all rows, unless there are too few panels to go round.
INLINE int parts_of_panel(int64_t panels, int64_t rows, int threads) {
  return panels >= 8 * threads ? 1 : (int)((rows + BLOCK_ROWS - 1) / BLOCK_ROWS);
}

template <class Type, class Finish>
static void multiply_part(
    const void* x, const void* packed, int64_t k, int64_t rows, int parts, int item, Finish finish) {
  const int64_t blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS, panel = item / parts, part = item % parts;
  const int64_t first = blocks * part / parts * BLOCK_ROWS, last = blocks * (part + 1) / parts * BLOCK_ROWS;
  multiply_panel<Type>(x, packed, k, panel, first, last < rows ? last : rows, [&](int64_t row, float* sums) {
    finish(panel, row, sums);
  });
}

template <class Type>
static void linear_part(const LinearCall& call, int parts, int item) {
  multiply_part<Type>(
      call.x, call.weight, call.k, call.rows, parts, item, [&](int64_t panel, int64_t row, const float* sums) {
        finish_row<typename Type::Scalar>(call, panel, row, sums);
      });
}

static bool run_linear(const LinearCall& call, const Turn& turn) {
  const int panels = (int)num_panels(call.n, call.epilogue >= GATED_SILU);
  const int parts = parts_of_panel(panels, call.rows, turn.threads);
  return turn.each(0, panels * parts, [&](int item) {
    if (call.dtype == BFLOAT16) linear_part<PairsOfBfloat16>(call, parts, item);
    else linear_part<Float32>(call, parts, item);
  });
}

static bool run_pack(const PackCall& call, const Turn& turn) {
  return turn.each(0, (int)num_panels(call.n, call.second), [&](int panel) {
    if (call.dtype == BFLOAT16) pack_panel<PairsOfBfloat16>(call, panel);
    else pack_panel<Float32>(call, panel);
  });
}

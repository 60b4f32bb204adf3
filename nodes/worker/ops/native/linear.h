// Linear layers: packing of weights into panels (see product.h), and the product, with what follows it fused in.
#pragma once
#include "product.h"
#include "threads.h"

constexpr int BLOCK_ROWS = 132;      // 22 tiles for which a panel is read, and widened, once
constexpr int LEAST_ROWS = 24;       // for a part of a panel: with fewer, the cost of widening it shows
constexpr int64_t BLOCK_K = 128;     // of a panel at a time: 32 KB when widened, which stay in the first-level cache

enum Dtype { FLOAT32 = 0, BFLOAT16 = 1 };
enum Activation { SILU = 0, GELU_TANH = 1, GELU_ERF = 2, RELU = 3 };
enum Epilogue { PLAIN = 0, PLUS = 1, GATED_SILU = 2, GATED_GELU = 3 };

struct LinearCall {
  const void* x;        // [rows, k]; x, other and y are of the type that rows are kept as (product.h: Rows)
  const void* weight;   // packed
  const float* bias;    // [n], or null; of a gated layer [2][n], the gate's first
  const void* other;    // [rows, n], for PLUS
  void* y;              // [rows, n]
  int64_t rows, n, k;
  int dtype, is_int8, epilogue; // dtype: of the model, and of the weight if that is not int8
};

struct PackCall {
  const void* weight;   // [n, k]
  const void* second;   // [n, k], or null; with it, panels are half of the first (the gate), half of the second
  void* packed;
  int* has_bad;         // set to 1 if int8 is asked for and a number is not finite
  int64_t n, k;
  int dtype, is_int8;
};

// Outputs of a panel: a gated layer makes each output from two columns.
INLINE int panel_outputs(bool is_gated) { return is_gated ? PANEL / 2 : PANEL; }
INLINE int64_t num_panels(int64_t n, bool is_gated) {
  return (n + panel_outputs(is_gated) - 1) / panel_outputs(is_gated);
}

template <class Type>
INLINE int64_t panel_bytes(int64_t k) {
  return Type::HEAD_BYTES + (k + Type::K_PER_STEP - 1) / Type::K_PER_STEP * Type::STEP_BYTES;
}

// Where column `column` of `panel` lies in the weight to be packed; null: it is beyond the last.
template <class Scalar>
INLINE const Scalar* column_of(const PackCall& call, int64_t panel, int column) {
  const int outputs = panel_outputs(call.second);
  const int64_t n = panel * outputs + column % outputs;
  return n < call.n ? (const Scalar*)(column < outputs ? call.weight : call.second) + n * call.k : nullptr;
}

template <class Type>
static void pack_panel(const PackCall& call, int64_t panel) {
  typedef typename Type::Scalar Scalar;
  constexpr int PER = Type::K_PER_STEP;
  Scalar* to = (Scalar*)((char*)call.packed + panel * panel_bytes<Type>(call.k));
  const int64_t steps = panel_bytes<Type>(call.k) / Type::STEP_BYTES;
  // Some steps at a time: each row of the weight is read in order, and what is written stays in the cache.
  for (int64_t begin = 0; begin < steps; begin += 64)
    for (int column = 0; column < PANEL; column++) {
      const Scalar* weight = column_of<Scalar>(call, panel, column);
      for (int64_t step = begin; step < begin + 64 && step < steps; step++)
        for (int i = 0; i < PER; i++) {
          const int64_t k = step * PER + i;
          to[(step * PANEL + column) * PER + i] = weight && k < call.k ? weight[k] : Scalar{};
        }
    }
}

INLINE float to_float(float x) { return x; }
INLINE float to_float(Bfloat16 x) { return __builtin_bit_cast(float, (uint32_t)x << 16); }

// Each column as whole numbers up to 127, times a 127th of its largest magnitude.
template <class Scalar>
static void pack_panel_int8(const PackCall& call, int64_t panel) {
  typedef Int8Of<Scalar> Type;
  char* packed = (char*)call.packed + panel * panel_bytes<Type>(call.k);
  float* scales = (float*)packed;
  int8_t* to = (int8_t*)(packed + Type::HEAD_BYTES);
  for (int column = 0; column < PANEL; column++) {
    const Scalar* weight = column_of<Scalar>(call, panel, column);
    float largest = 0;
    bool is_good = true;
    for (int64_t k = 0; weight && k < call.k; k++) {
      const float x = __builtin_fabsf(to_float(weight[k]));
      largest = x > largest ? x : largest;
      is_good = is_good && x <= __FLT_MAX__;
    }
    if (!is_good) __atomic_store_n(call.has_bad, 1, __ATOMIC_RELAXED);
    // A column of zeros, or so small that a 127th is not a normal number, becomes zeros: there is nothing to divide by.
    const float scale = is_good && largest / 127.0f >= __FLT_MIN__ ? largest / 127.0f : 0;
    scales[column] = scale;
    for (int64_t k = 0; scale && k < call.k; k++)
      to[k * PANEL + column] = (int8_t)__builtin_lrintf(to_float(weight[k]) / scale);
  }
}

// Output `n` of a packed int8 weight of `k` inputs, times `scale`.
template <class Scalar>
static void unpack_row(const void* packed, int64_t k, int64_t n, float scale, float* to) {
  typedef Int8Of<Scalar> Type;
  const char* panel = (const char*)packed + n / PANEL * panel_bytes<Type>(k);
  const int8_t* from = (const int8_t*)panel + Type::HEAD_BYTES + n % PANEL;
  scale *= ((const float*)panel)[n % PANEL];
  for (int64_t i = 0; i < k; i++) to[i] = (float)from[i * PANEL] * scale;
}

// SiLU; GELU by the error function, or in its tanh form, which is x times the sigmoid of a cubic; ReLU.
INLINE Floats activated(Floats x, int activation) {
  if (activation == GELU_ERF) return x * 0.5f * (1.0f + error_function(x * 0.70710678f));
  if (activation == RELU) return larger(splat(0.0f), x);
  const Floats inner = activation == GELU_TANH ? x * (1.5957691216f + 0.0713548163f * x * x) : x;
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
      value = activated(value, call.epilogue == GATED_GELU ? GELU_TANH : SILU) * up;
    }
    if (call.epilogue == PLUS) value = value + load_first((const RowOf<Scalar>*)call.other + at, count);
    store_first((RowOf<Scalar>*)call.y + at, value, count);
  }
}

// Multiplies rows, cut into tiles, by a block of k of one panel.
template <class Type>
static void multiply_block(
    const typename Type::Factor* x, int64_t x_stride, int rows, const char* weight, int64_t count, float* sums,
    bool is_first) {
  typedef typename Type::Factor Factor;
  typedef typename Type::Kernel Kernel;
  typedef typename Type::Wide Wide;
  alignas(64) Factor padded[TILE_ROWS * BLOCK_K];
  const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  const int64_t steps = (count + Type::K_PER_STEP - 1) / Type::K_PER_STEP;
  const int64_t bytes = steps * Type::STEP_BYTES;
  const bool is_padded = count % Type::K_PER_STEP;
  alignas(64) char wide[Kernel::IS_WIDE ? 1 : BLOCK_K * PANEL * sizeof(Factor)];
  const char* shared = weight;
  if constexpr (!Kernel::IS_WIDE)
    if (tiles > 1) {
      widen(Kernel{}, weight, steps, wide);
      shared = wide;
    }
  for (int tile = 0; tile < tiles; tile++) {
    // Tiles of nearly equal size: seven rows make three and four.
    const int first = rows * tile / tiles, size = rows * (tile + 1) / tiles - first;
    const Factor* by = x + first * x_stride;
    if (is_padded) {
      // What lies behind an odd end may be NaN, and multiplying it by the packed zero would not make it zero.
      for (int r = 0; r < size; r++) {
        memcpy(padded + r * BLOCK_K, by + r * x_stride, count * sizeof *by);
        padded[r * BLOCK_K + count] = 0;
      }
      by = padded;
    }
    const int64_t by_stride = is_padded ? BLOCK_K : x_stride;
    float* to = sums + first * PANEL;
    if (tiles == 1) {
      // For int8 the processor's own prefetching does too little (1.3 times at one row); for others it does best alone.
      const Ahead ahead = {weight + bytes, Type::HEAD_BYTES ? bytes : 0};
      multiply<Kernel>(size, by, by_stride, weight, Type::STEP_BYTES, steps, to, PANEL, PANEL / LANES, is_first, ahead);
      return;
    }
    const Ahead ahead = {weight + bytes + bytes * tile / tiles, bytes / tiles};
    const int64_t wide_steps = (count + Wide::K_PER_STEP - 1) / Wide::K_PER_STEP;
    multiply<Wide>(
        size, by, by_stride, shared, Wide::STEP_BYTES, wide_steps, to, PANEL, PANEL / LANES, is_first, ahead);
  }
}

// Rows first_row .. last_row - 1 of `x_rows`, `[rows, k_size]`, times one panel of a packed weight; `finish(row, sums)`
// gets the 64 sums of each row.
template <class Type, class Finish>
static void multiply_panel(
    const void* x_rows, const void* packed, int64_t k_size, int64_t panel, int64_t first_row, int64_t last_row,
    Finish finish) {
  alignas(64) float sums[BLOCK_ROWS * PANEL];
  const char* head = (const char*)packed + panel * panel_bytes<Type>(k_size);
  const int64_t blocks = (last_row - first_row + BLOCK_ROWS - 1) / BLOCK_ROWS;
  for (int64_t block = 0; block < blocks; block++) {
    const int64_t begin = first_row + (last_row - first_row) * block / blocks;
    const int rows = (int)(first_row + (last_row - first_row) * (block + 1) / blocks - begin);
    const char* weight = head + Type::HEAD_BYTES;
    for (int64_t k = 0; k < k_size; k += BLOCK_K, weight += BLOCK_K / Type::K_PER_STEP * Type::STEP_BYTES)
      multiply_block<Type>(
          (const typename Type::Factor*)x_rows + begin * k_size + k, k_size, rows, weight,
          k_size - k < BLOCK_K ? k_size - k : BLOCK_K, sums, k == 0);
    for (int r = 0; r < rows; r++) {
      if constexpr (Type::HEAD_BYTES != 0)
        for (int column = 0; column < PANEL; column += LANES)
          store(sums + r * PANEL + column, load(sums + r * PANEL + column) * load((const float*)head + column));
      finish(begin + r, sums + r * PANEL);
    }
  }
}

// Into how many parts the rows of a panel are cut: as few as have no more rows than a block, or more if there are too
// few panels for the threads.
INLINE int parts_of_panel(int64_t panels, int64_t rows, int threads) {
  const int64_t wanted = (8 * threads + panels - 1) / panels, most = rows / LEAST_ROWS;
  const int64_t least = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS, parts = wanted < most ? wanted : most;
  return (int)(parts > least ? parts : least);
}

// All panels for some rows, then all for the next rows: a block's rows stay in the second-level cache from panel to
// panel. With all rows for one panel, then for the next panel, a product of 512 rows took 1.15 times as long.
template <class Type, class Finish>
static void multiply_part(
    const void* x, const void* packed, int64_t k, int64_t rows, int64_t panels, int parts, int item, Finish finish) {
  const int64_t panel = item % panels, part = item / panels;
  multiply_panel<Type>(
      x, packed, k, panel, rows * part / parts, rows * (part + 1) / parts,
      [&](int64_t row, float* sums) { finish(panel, row, sums); });
}

// Calls `run` with the type of weights that rows of `dtype` are multiplied by.
template <class Run>
INLINE auto with_weights(int dtype, bool is_int8, Run run) {
  if (dtype == BFLOAT16) return is_int8 ? run(Int8Of<Bfloat16>{}) : run(PairsOfBfloat16{});
  return is_int8 ? run(Int8Of<float>{}) : run(Float32{});
}

template <class Type>
static void linear_part(const LinearCall& call, int64_t panels, int parts, int item) {
  multiply_part<Type>(
      call.x, call.weight, call.k, call.rows, panels, parts, item, [&](int64_t panel, int64_t row, const float* sums) {
        finish_row<typename Type::Scalar>(call, panel, row, sums);
      });
}

static bool run_linear(const LinearCall& call, const Turn& turn) {
  const int panels = (int)num_panels(call.n, call.epilogue >= GATED_SILU);
  const int parts = parts_of_panel(panels, call.rows, turn.threads);
  return turn.each(0, panels * parts, [&](int item) {
    with_weights(call.dtype, call.is_int8, [&](auto type) { linear_part<decltype(type)>(call, panels, parts, item); });
  });
}

static bool run_pack(const PackCall& call, const Turn& turn) {
  return turn.each(0, (int)num_panels(call.n, call.second), [&](int panel) {
    if (call.is_int8) return call.dtype == BFLOAT16 ? pack_panel_int8<Bfloat16>(call, panel) : pack_panel_int8<float>(call, panel);
    call.dtype == BFLOAT16 ? pack_panel<PairsOfBfloat16>(call, panel) : pack_panel<Float32>(call, panel);
  });
}

// RMS norm, row by row in float32.
#pragma once
#include "linear.h"

// y = x / rms(x) * weight + add, n numbers each; `add` may be null.
template <class From, class To>
static void norm_row(const From* x, const float* weight, To* y, int64_t n, float eps, const float* add = nullptr) {
  // Four sums, or each addition would wait for the one before; always added up in this order.
  Floats squares[4] = {};
  for (int64_t i = 0; i < n; i += LANES) {
    Floats value = load_first(x + i, n - i < LANES ? (int)(n - i) : LANES);
    Floats& sum = squares[i / LANES % 4];
    sum = multiply_add(value, value, sum);
  }
  const float mean = sum_lanes((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)n;
  const float scale = 1.0f / __builtin_sqrtf(mean + eps);
  for (int64_t i = 0; i < n; i += LANES) {
    const int count = n - i < LANES ? (int)(n - i) : LANES;
    Floats value = load_first(x + i, count) * scale * load_first(weight + i, count);
    if (add) value = value + load_first(add + i, count);
    store_first(y + i, value, count);
  }
}

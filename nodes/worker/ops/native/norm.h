// RMS norm and layer norm, row by row in float32.
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

// y = (x - mean) / deviation * weight + bias, n numbers each; `y` may be `x`.
static void layer_norm_row(const float* x, const float* weight, const float* bias, float* y, int64_t n, float eps) {
  // In four sums each, as above. Squares are of the differences: those of x would lose a small deviation from a far mean.
  Floats sums[4] = {};
  for (int64_t i = 0; i < n; i += LANES) {
    Floats& sum = sums[i / LANES % 4];
    sum = sum + load_first(x + i, n - i < LANES ? (int)(n - i) : LANES);
  }
  const float mean = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])) / (float)n;
  Floats squares[4] = {};
  for (int64_t i = 0; i < n; i += LANES) {
    const int count = n - i < LANES ? (int)(n - i) : LANES;
    const Floats apart = keep_lanes(load_first(x + i, count) - mean, 0, count, 0.0f);
    Floats& sum = squares[i / LANES % 4];
    sum = multiply_add(apart, apart, sum);
  }
  const float variance = sum_lanes((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)n;
  const float scale = 1.0f / __builtin_sqrtf(variance + eps);
  for (int64_t i = 0; i < n; i += LANES) {
    const int count = n - i < LANES ? (int)(n - i) : LANES;
    const Floats apart = (load_first(x + i, count) - mean) * scale;
    store_first(y + i, multiply_add(apart, load_first(weight + i, count), load_first(bias + i, count)), count);
  }
}

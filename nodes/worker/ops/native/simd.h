// Vectors of float32, as wide as the instruction set has them, and what the kernels do with them.
//
// Written in the compiler's own vector types, so that all builds share one source; only a few operations, such as fused
// multiplication and the product of bfloat16 pairs, name an instruction. Nothing here depends on where in memory a
// value lies: anything shorter than a vector is padded with zeros and computed in the same way.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

#ifndef LANES
#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif
#endif

typedef uint16_t Bfloat16;
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

INLINE Floats splat(float x) { return x - Floats{}; }
INLINE Ints splat_bits(int32_t x) { return x - Ints{}; }

template <class Vector>
INLINE Vector load_as(const void* from) {
  Vector found;
  memcpy(&found, from, sizeof found);
  return found;
}

INLINE Floats load(const float* from) { return load_as<Floats>(from); }
INLINE void store(float* to, Floats x) { memcpy(to, &x, sizeof x); }

INLINE Floats load(const Bfloat16* from) {
  return (Floats)(__builtin_convertvector(load_as<Halves>(from), Words) << 16);
}

// Compilers split a conversion of vectors here, so the instruction is named.
INLINE Floats load(const int8_t* from) {
#if LANES == 16 && defined(__AVX512F__)
  // The form without a mask has an operand that some compilers warn about.
  const Ints wide = (Ints)_mm512_maskz_cvtepi8_epi32(0xffff, load_as<__m128i>(from));
#elif LANES == 8
  const Ints wide = (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  const Ints wide = __builtin_convertvector(load_as<Bytes>(from), Ints);
#endif
  return __builtin_convertvector(wide, Floats);
}

// Rounds to bfloat16, in the upper halves: to the nearest, ties to even. NaN is treated apart, because rounding up
// could carry its mantissa away.
INLINE Words rounded(Floats x) {
  const Words bits = (Words)x;
  return x == x ? bits + 0x7fff + ((bits >> 16) & 1) : bits | 0x400000;
}

INLINE void store(Bfloat16* to, Floats x) {
  Halves half = __builtin_convertvector(rounded(x) >> 16, Halves);
  memcpy(to, &half, sizeof half);
}

// A bfloat16 kept as the float32 of equal value.
struct Widened {
  float value;
};

INLINE Floats load(const Widened* from) { return load_as<Floats>(from); }
INLINE void store(Widened* to, Floats x) {
  const Words bits = rounded(x) & 0xffff0000;
  memcpy(to, &bits, sizeof bits);
}

template <class Scalar>
INLINE Floats load_first(const Scalar* from, int count) {
  if (count >= LANES) return load(from);
  Scalar some[LANES] = {};
  memcpy(some, from, count * sizeof(Scalar));
  return load(some);
}

template <class Scalar>
INLINE void store_first(Scalar* to, Floats x, int count) {
  if (count >= LANES) return store(to, x);
  Scalar some[LANES];
  store(some, x);
  memcpy(to, some, count * sizeof(Scalar));
}

INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if LANES == 16 && defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif LANES == 8
  return _mm256_fmadd_ps(a, b, c);
#else
  // Wide vectors on a CPU that has none, so that the tests can run the wide kernels' logic anywhere.
  struct Halved {
    __m256 low, high;
  } x, y, z;
  memcpy(&x, &a, sizeof x);
  memcpy(&y, &b, sizeof y);
  memcpy(&z, &c, sizeof z);
  z = {_mm256_fmadd_ps(x.low, y.low, z.low), _mm256_fmadd_ps(x.high, y.high, z.high)};
  return load_as<Floats>(&z);
#endif
}

// If either operand is NaN, the result is the second one, so that a NaN there survives; so it is if both are zeros. The
// instructions are named, because GCC 12 makes a comparison and a blend of `a > b ? a : b`.
INLINE Floats larger(Floats a, Floats b) {
#if LANES == 16 && defined(__AVX512F__)
  return _mm512_maskz_max_ps(0xffff, a, b);  // without a mask compilers warn, see above
#elif LANES == 8
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

INLINE Floats smaller(Floats a, Floats b) {
#if LANES == 16 && defined(__AVX512F__)
  return _mm512_maskz_min_ps(0xffff, a, b);
#elif LANES == 8
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

// Lanes `first .. last-1` of x, `other` in the rest.
INLINE Floats keep_lanes(Floats x, int first, int last, float other) {
  Ints lane;
  UNROLL for (int i = 0; i < LANES; i++) lane[i] = i;
  return (lane >= first) & (lane < last) ? x : splat(other);
}

// Combines the first half of the lanes with the second, then the halves of that, down to one. In registers: as a loop
// over lanes, this and the sum of a row of weights took longer than their exponentials.
template <class Combine>
INLINE float reduce_lanes(Floats x, Combine combine) {
  __m256 eight;
#if LANES == 8
  eight = x;
#else
  eight = combine(
      (__m256)__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7),
      (__m256)__builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
#endif
  // The upper lanes of what follows are not used.
  eight = combine(eight, _mm256_castps128_ps256(_mm256_extractf128_ps(eight, 1)));
  eight = combine(eight, _mm256_permute_ps(eight, 0xee));
  eight = combine(eight, _mm256_permute_ps(eight, 0x55));
  return _mm256_cvtss_f32(eight);
}

INLINE float sum_lanes(Floats x) {
  return reduce_lanes(x, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); });
}

// If the first of two lanes that are compared is NaN, it is lost.
INLINE float largest_lane(Floats x) {
  return reduce_lanes(x, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); });
}

// Which lanes are set in a comparison's result, a bit for each.
INLINE uint32_t set_lanes(Ints mask) {
#if LANES == 8
  return (uint32_t)_mm256_movemask_ps((__m256)mask);
#elif defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#else
  uint32_t bits = 0;
  for (int i = 0; i < LANES; i++) bits |= mask[i] ? 1u << i : 0;
  return bits;
#endif
}

// The first lane that is set in a comparison's result, or LANES.
INLINE int first_set(Ints mask) { return __builtin_ctz(set_lanes(mask) | 1u << LANES); }

// e to the x, relative error about 1e-7; x is kept within -87 and 88, where float32's range ends, so nothing overflows.
INLINE Floats exponential(Floats x) {
  x = larger(splat(-87.0f), x);
  x = smaller(splat(88.0f), x);
  // Adding this leaves the nearest integer in the lowest bits of the mantissa.
  const Floats shift = splat(12582912.0f);
  Floats shifted = multiply_add(x, splat(1.44269504f), shift);
  Floats whole = shifted - shift;
  Floats rest = multiply_add(whole, splat(-0.693145752f), x);
  rest = multiply_add(whole, splat(-1.42860677e-6f), rest);
  Floats power = splat(1.0f / 720);
  power = multiply_add(power, rest, splat(1.0f / 120));
  power = multiply_add(power, rest, splat(1.0f / 24));
  power = multiply_add(power, rest, splat(1.0f / 6));
  power = multiply_add(power, rest, splat(0.5f));
  power = multiply_add(power, rest, splat(1.0f));
  power = multiply_add(power, rest, splat(1.0f));
  Ints exponent = ((Ints)shifted - (Ints)shift + 127) << 23;
  return power * (Floats)exponent;
}

// The error function, absolute error below 4e-7: x times a quotient of polynomials in its square. Beyond 4 it is 1.
INLINE Floats error_function(Floats x) {
  x = larger(splat(-4.0f), x);
  x = smaller(splat(4.0f), x);
  const Floats square = x * x;
  Floats above = splat(-2.72614225801306e-10f);
  above = multiply_add(above, square, splat(2.77068142495902e-08f));
  above = multiply_add(above, square, splat(-2.10102402082508e-06f));
  above = multiply_add(above, square, splat(-5.69250639462346e-05f));
  above = multiply_add(above, square, splat(-7.34990630326855e-04f));
  above = multiply_add(above, square, splat(-2.95459980854025e-03f));
  above = multiply_add(above, square, splat(-1.60960333262415e-02f));
  Floats below = splat(-1.45660718464996e-05f);
  below = multiply_add(below, square, splat(-2.13374055278905e-04f));
  below = multiply_add(below, square, splat(-1.68282697438203e-03f));
  below = multiply_add(below, square, splat(-7.37332916720468e-03f));
  below = multiply_add(below, square, splat(-1.42647390514189e-02f));
  return x * above / below;
}

// Draws tokens from rows of logits, and reads their probabilities: what nodes/worker/draw/sampler.py and measuring.py
// do with torch, one row at a time in a thread's own cache.
//
// A row's numbers depend on nothing but the row, whatever the instruction set: operations are on single numbers, and
// sums are taken in one order, which is torch's, so that draws differ from it only where its `exp` is rounded otherwise.
// In pieces of 1,024 columns, float32: 32 running sums, one for each column modulo 32, of 16 numbers
// each; those of the first and the second 512 columns are added; then columns 0, 8, 16 and 24 modulo 32, one after the
// other; then the 8 sums that remain, one after the other. Sums of pieces, of a piece's columns and of sorted
// candidates are running sums in double.
#pragma once
#include <math.h>

#include "threads.h"

constexpr int GROUP = 64;          // columns; the highest logit of each group is kept, to skip groups by
constexpr int PIECE = 1024;
constexpr int RUNNING = 32;        // sums within a piece
constexpr float NEVER = -9999.0f;  // written for the logarithm of 0: JSON has no infinity
constexpr float MINUS_INFINITY = -__builtin_inff();
// Logarithms of the weights from which on candidates are taken. The last stands for all: e to the -37 is under half an
// ulp of 1, the least that a sum of candidates can be.
constexpr float WINDOWS[] = {-4.0f, -12.0f, -37.0f};

enum RowFlag { DRAWS = 1, GREEDY = 2, EDITED = 4, READS = 8, PROCESSED = 16 };
enum { NOT_DRAWN = -1, NO_CANDIDATE = -2 };

// One row: how it is drawn and what is read of it.
struct RowTask {
  int64_t mask, mask_bytes;        // where it begins: a bit for each id that is allowed; -1: all are
  double number, top_p;            // the draw's random number, in [0, 1)
  float temperature, lowest;       // logarithm of min_p, or minus infinity
  int32_t top_k;                   // 0: all
  int32_t entries, num_bias, num_scale, num_add;  // where its edits of single logits begin, in their order
  int32_t row, flags;              // of the logits; RowFlag
  int32_t line, ids;               // where it begins, in words; where the ids begin that are read
  int32_t top, width, num_ids;     // most likely ids that are read, and the most of any row
};

struct RowsCall {
  const float* logits;
  const RowTask* tasks;
  const uint8_t* masks;
  const int64_t* entry_ids;
  const float* entry_values;
  const int32_t* read_ids;
  int32_t* tokens;                 // [tasks]: of rows that draw written, else read
  int32_t* lines;                  // logprob, rank, (id, logprob) x width, logprob x ids
  char* scratch;                   // [threads][RowScratch::bytes]
  int64_t stride, size;
  int32_t num_tasks;
};

// A row, and the highest logit of each of its groups. The last group lies apart, filled up with minus infinity.
struct Row {
  const float *at, *last;
  float* tops;
  int64_t size, num_groups;

  const float* group(int64_t number) const { return number == num_groups - 1 ? last : at + number * GROUP; }
};

INLINE int64_t groups_of(int64_t size) { return (size + GROUP - 1) / GROUP; }

struct RowScratch {
  float *row, *tops, *last;
  double *pieces, *sums;           // running sums of pieces and of candidates
  uint64_t *candidates, *sorted;

  RowScratch(char* at, int64_t size) {
    const int64_t groups = groups_of(size);
    candidates = (uint64_t*)at;
    sorted = candidates + groups * GROUP;
    sums = (double*)(sorted + groups * GROUP);
    pieces = sums + groups * GROUP;
    row = (float*)(pieces + groups);
    tops = row + groups * GROUP;
    last = tops + groups + GROUP;
  }
  static int64_t bytes(int64_t size) {
    const int64_t groups = groups_of(size);
    return (groups * (GROUP * 28 + 12) + 2 * GROUP * 4 + 127) / 128 * 128;
  }
};

// Logarithms of weights, relative to the most likely token's. Divided as torch divides: draws after the highest is
// subtracted, reads before.
enum Division { NONE, AFTER, BEFORE };

template <Division division>
struct Scale {
  float highest, divisor;          // of BEFORE, the highest is divided, too

  Scale(float highest, float divisor) : highest(division == BEFORE ? highest / divisor : highest), divisor(divisor) {}
  float operator()(float x) const {
    return division == NONE ? x - highest : division == AFTER ? (x - highest) / divisor : x / divisor - highest;
  }
  Floats operator()(Floats x) const {
    const Floats by = splat(divisor), from = splat(highest);
    return division == NONE ? x - from : division == AFTER ? (x - from) / by : x / by - from;
  }
};

// e to the x, for x of at most 0: in 99 of 100 cases the float nearest to it, as torch's. The steps and the polynomial
// are those of Sleef's expf, but what two of its steps round off is kept, without which it would be 90 of 100.
INLINE Floats weights_of(Floats x) {
  const Floats bounded = larger(splat(-104.0f), x), shift = splat(12582912.0f), one = splat(1.0f);
  const Floats shifted = bounded * splat(1.442695040888963407f) + shift, whole = shifted - shift;
  const Floats above = multiply_add(whole, splat(-0.693145751953125f), bounded), low = splat(-1.428606765330187045e-06f);
  const Floats rest = multiply_add(whole, low, above), rounded_off = multiply_add(whole, low, above - rest);
  Floats power = splat(0.000198527617612853646278381f);
  power = multiply_add(power, rest, splat(0.00139304355252534151077271f));
  power = multiply_add(power, rest, splat(0.00833336077630519866943359f));
  power = multiply_add(power, rest, splat(0.0416664853692054748535156f));
  power = multiply_add(power, rest, splat(0.166666671633720397949219f));
  power = multiply_add(power, rest, splat(0.5f));
  const Floats linear = one + rest, small = multiply_add(rounded_off, linear, rest - (linear - one));
  power = linear + multiply_add(rest * rest, power, small);
  // In two factors: the smallest results are subnormal, and their exponent alone is no float's.
  const Ints exponent = (Ints)shifted - (Ints)shift, half = exponent >> 1;
  power = power * (Floats)((half + 127) << 23) * (Floats)((exponent - half + 127) << 23);
  return x < -104.0f ? Floats{} : power;
}

// Minus infinity for the columns that are not set in `bits`, to be added.
INLINE Floats forbidden(uint32_t bits) {
  Ints lane;
  UNROLL for (int i = 0; i < LANES; i++) lane[i] = 1 << i;
  return (splat_bits((int32_t)bits) & lane) != 0 ? Floats{} : splat(MINUS_INFINITY);
}

// As `largest_lane`, but faster; of numbers only. Taken for each group, that one was half of the time of finding tops.
INLINE float top_lane(Floats x) {
#if LANES == 16
  __m256 halves[2];
  memcpy(halves, &x, sizeof halves);
  const __m256 eight = _mm256_max_ps(halves[0], halves[1]);
#else
  const __m256 eight = (__m256)x;
#endif
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// The highest number of a group, whose columns `load_at` gives; NaN if there is one.
template <class LoadAt>
INLINE float top_by(LoadAt load_at) {
  Floats highest = splat(MINUS_INFINITY);
  Ints is_bad = {};
  UNROLL for (int column = 0; column < GROUP; column += LANES) {
    const Floats x = load_at(column);
    highest = larger(x, highest);
    is_bad |= x != x;
  }
  return set_lanes(is_bad) ? __builtin_nanf("") : top_lane(highest);
}

INLINE float top_of(const float* group) {
  return top_by([&](int column) { return load(group + column); });
}

// NaN if there is one.
static float highest_of(const Row& row) {
  float highest = MINUS_INFINITY;
  for (int64_t number = 0; number < row.num_groups; number++) {
    if (row.tops[number] != row.tops[number]) return row.tops[number];
    if (row.tops[number] > highest) highest = row.tops[number];
  }
  return highest;
}

// The row as the model gives it; `find_tops` follows.
static Row row_of_logits(const float* logits, int64_t size, const RowScratch& scratch) {
  const int64_t groups = groups_of(size), before = (groups - 1) * GROUP;
  for (int column = 0; column < GROUP; column++)
    scratch.last[column] = before + column < size ? logits[before + column] : MINUS_INFINITY;
  return Row{logits, scratch.last, scratch.tops, size, groups};
}

// Returns the highest; NaN if there is one.
static float find_tops(const Row& row) {
  for (int64_t number = 0; number < row.num_groups; number++) row.tops[number] = top_of(row.group(number));
  return highest_of(row);
}

// Adds, divides or multiplies, and keeps the group's top.
static void edit_logit(const Row& row, float& x, int64_t id, float value, bool is_scale) {
  const float before = x;
  x = !is_scale ? x + value : x < 0 ? x * value : x / value;
  float& top = row.tops[id / GROUP];
  if (x != x) top = x;
  else if (x >= top) top = x;
  else if (before == top) top = top_of(row.group(id / GROUP));
}

// The row as it is drawn from. What may not be drawn gets minus infinity added, so that a NaN stays one.
static Row edited_row(const RowsCall& call, const RowTask& task, const Row& plain, const RowScratch& scratch) {
  const Row row{scratch.row, scratch.row + (plain.num_groups - 1) * GROUP, scratch.tops, plain.size, plain.num_groups};
  const uint8_t* mask = call.masks + task.mask;
  for (int64_t number = 0; number < row.num_groups; number++) {
    const float* from = plain.group(number);
    float* to = scratch.row + number * GROUP;
    uint64_t bits = ~0ull;
    if (task.mask >= 0) {
      const int64_t left = task.mask_bytes - number * 8;
      bits = 0;
      if (left >= 8) memcpy(&bits, mask + number * 8, 8);
      else if (left > 0) memcpy(&bits, mask + number * 8, left);
    }
    row.tops[number] = top_by([&](int column) {
      Floats x = load(from + column);
      if (~bits) x = x + forbidden((uint32_t)(bits >> column));
      store(to + column, x);
      return x;
    });
  }
  const int64_t* ids = call.entry_ids + task.entries;
  const float* values = call.entry_values + task.entries;
  const int first_add = task.num_bias + task.num_scale;
  for (int i = 0; i < first_add + task.num_add; i++)
    if (ids[i] >= 0 && ids[i] < row.size)
      edit_logit(row, scratch.row[ids[i]], ids[i], values[i], i >= task.num_bias && i < first_add);
  return row;
}

INLINE bool is_finite(float x) { return x - x == 0; }

// The lowest id that has it.
static int32_t first_of(const Row& row, float highest) {
  for (int64_t number = 0; number < row.num_groups; number++) {
    if (row.tops[number] != highest) continue;
    for (int column = 0; column < GROUP; column++)
      if (row.group(number)[column] == highest) return (int32_t)(number * GROUP) + column;
  }
  return NOT_DRAWN;
}

// Running sums of the pieces' weights; returns that of all.
template <class Scaled>
static double sum_pieces(const Row& row, Scaled scale, double* sums) {
  constexpr int VECTORS = RUNNING / LANES, GROUPS = PIECE / GROUP;
  double total = 0;
  for (int64_t first = 0; first < row.num_groups; first += GROUPS) {
    Floats running[2][VECTORS] = {};
    for (int i = 0; i < GROUPS && first + i < row.num_groups; i++) {
      // Then all its weights are 0.
      if (scale(row.tops[first + i]) < -104.0f) continue;
      const float* group = row.group(first + i);
      Floats* of_half = running[i >= GROUPS / 2];
      for (int column = 0; column < GROUP; column += RUNNING)
        UNROLL for (int j = 0; j < VECTORS; j++)
          of_half[j] = of_half[j] + weights_of(scale(load(group + column + j * LANES)));
    }
    float all[RUNNING], sum = 0;
    for (int j = 0; j < VECTORS; j++) store(all + j * LANES, running[0][j] + running[1][j]);
    for (int i = 0; i < 8; i++) sum += all[i] + all[i + 8] + all[i + 16] + all[i + 24];
    total += sum;
    sums[first / GROUPS] = total;
  }
  return total;
}

// Index of the first sum above `target` (`inclusive`: or equal); if rounding leaves none, of the first that is highest.
static int64_t first_above(const double* sums, int64_t count, double target, bool inclusive) {
  int64_t begin = 0, end = count;
  while (begin < end) {
    const int64_t middle = (begin + end) / 2;
    if (sums[middle] > target || (inclusive && sums[middle] == target)) end = middle;
    else begin = middle + 1;
  }
  return begin < count ? begin : first_above(sums, count, sums[count - 1], true);
}

template <class Scaled>
static int32_t draw_any(const Row& row, Scaled scale, double number, const RowScratch& scratch) {
  const int64_t num_pieces = (row.num_groups * GROUP + PIECE - 1) / PIECE;
  const double target = number * sum_pieces(row, scale, scratch.pieces);
  const int64_t piece = first_above(scratch.pieces, num_pieces, target, false);
  double sum = 0;
  int64_t count = 0;
  for (int64_t i = piece * PIECE / GROUP; i < row.num_groups && count < PIECE; i++)
    for (int column = 0; column < GROUP; column += LANES) {
      const Floats weights = weights_of(scale(load(row.group(i) + column)));
      for (int lane = 0; lane < LANES; lane++) scratch.sums[count++] = sum += weights[lane];
    }
  const double before = piece ? scratch.pieces[piece - 1] : 0;
  return (int32_t)(piece * PIECE + first_above(scratch.sums, count, target - before, false));
}

// Candidates: logarithms of weights of at least `least`, in the order of ids: their bits without the sign, then the id.
template <class Scaled>
static int64_t gather_candidates(const Row& row, Scaled scale, float least, uint64_t* candidates) {
  int64_t count = 0;
  for (int64_t number = 0; number < row.num_groups; number++) {
    if (!(scale(row.tops[number]) >= least)) continue;
    for (int column = 0; column < GROUP; column += LANES) {
      const Floats x = scale(load(row.group(number) + column));
      uint32_t bits[LANES];
      store((float*)bits, x);
      for (uint32_t set = set_lanes(x >= least); set; set &= set - 1) {
        const int lane = __builtin_ctz(set);
        candidates[count++] = (uint64_t)(bits[lane] & 0x7fffffff) << 32 | (uint32_t)(number * GROUP + column + lane);
      }
    }
  }
  return count;
}

// Most likely first, of equals the lower id first; returns where they are.
static uint64_t* sort_candidates(uint64_t* from, uint64_t* to, int64_t count) {
  constexpr int DIGIT = 11;
  if (count <= 32) {
    for (int64_t i = 1; i < count; i++) {
      const uint64_t one = from[i];
      int64_t at = i;
      for (; at && from[at - 1] > one; at--) from[at] = from[at - 1];
      from[at] = one;
    }
    return from;
  }
  for (int shift = 32; shift < 64; shift += DIGIT) {
    uint32_t ends[1 << DIGIT] = {}, begin = 0;
    const auto digit = [&](uint64_t one) { return one >> shift & ((1 << DIGIT) - 1); };
    for (int64_t i = 0; i < count; i++) ends[digit(from[i])]++;
    if (ends[digit(from[0])] == count) continue;
    for (uint32_t& end : ends) {
      const uint32_t length = end;
      end = begin;
      begin += length;
    }
    for (int64_t i = 0; i < count; i++) to[ends[digit(from[i])]++] = from[i];
    uint64_t* other = from;
    from = to;
    to = other;
  }
  return from;
}

// Running sums of the weights of the first `count` of sorted candidates.
static void sum_candidates(const uint64_t* sorted, int64_t count, double* sums) {
  double sum = 0;
  for (int64_t first = 0; first < count; first += LANES) {
    const int here = count - first < LANES ? (int)(count - first) : LANES;
    Ints bits = {};
    for (int lane = 0; lane < here; lane++) bits[lane] = (int32_t)(sorted[first + lane] >> 32 | 0x80000000);
    const Floats weights = weights_of((Floats)bits);
    for (int lane = 0; lane < here; lane++) sums[first + lane] = sum += weights[lane];
  }
}

// How many candidates pass top_k and top_p; 0 if more are needed to tell. `is_whole`: none that passes min_p is missing.
static int64_t num_kept(const RowTask& task, const double* sums, int64_t count, double total, bool is_whole) {
  int64_t kept = count;
  double base = total;
  if (task.top_k > 0) {
    if (count < task.top_k && !is_whole) return 0;
    kept = count < task.top_k ? count : task.top_k;
    base = sums[kept - 1];
  } else if (task.lowest > MINUS_INFINITY) {
    if (!is_whole) return 0;
    base = sums[count - 1];
  } else if (!is_whole && sums[count - 1] < task.top_p * base) {
    return 0;
  }
  if (task.top_p >= 1) return kept;
  const int64_t nucleus = first_above(sums, count, task.top_p * base, true) + 1;
  return nucleus < kept ? nucleus : kept;
}

// Where candidates begin: at least `top_k` tokens are as likely as the group whose top is the `top_k`-th of all tops.
template <class Scaled>
static float first_window(const Row& row, Scaled scale, int32_t top_k, const RowScratch& scratch) {
  if (top_k <= 0 || top_k > row.num_groups) return WINDOWS[0];
  for (int64_t number = 0; number < row.num_groups; number++) {
    const float top = scale(row.tops[number]);
    uint32_t bits;
    memcpy(&bits, &top, sizeof bits);
    scratch.candidates[number] = (uint64_t)(bits & 0x7fffffff) << 32;
  }
  const uint32_t bits = sort_candidates(scratch.candidates, scratch.sorted, row.num_groups)[top_k - 1] >> 32;
  float found;
  memcpy(&found, &bits, sizeof found);
  return found < -WINDOWS[2] ? -found : WINDOWS[2];
}

// Candidates are taken from the top down, as far as the filters need them.
template <class Scaled>
static int32_t draw_filtered(const Row& row, Scaled scale, const RowTask& task, const RowScratch& scratch) {
  const bool needs_total = task.top_k <= 0 && task.lowest == MINUS_INFINITY;
  const double total = needs_total ? sum_pieces(row, scale, scratch.pieces) : 0;
  const float windows[] = {first_window(row, scale, task.top_k, scratch), WINDOWS[1], WINDOWS[2]};
  for (const float window : windows) {
    const bool is_whole = window <= task.lowest || window == WINDOWS[2];
    const float least = window > task.lowest ? window : task.lowest;
    const int64_t count = gather_candidates(row, scale, least, scratch.candidates);
    if (task.top_k > count && !is_whole) continue;
    const uint64_t* sorted = sort_candidates(scratch.candidates, scratch.sorted, count);
    const int64_t needed = task.top_k > 0 && task.top_k < count ? task.top_k : count;
    sum_candidates(sorted, needed, scratch.sums);
    const int64_t kept = num_kept(task, scratch.sums, needed, total, is_whole);
    if (kept) return (int32_t)sorted[first_above(scratch.sums, kept, task.number * scratch.sums[kept - 1], false)];
  }
  return NOT_DRAWN;
}

template <class Scaled>
static int32_t draw_scaled(const Row& row, Scaled scale, const RowTask& task, const RowScratch& scratch) {
  if (task.top_k > 0 || task.top_p < 1 || task.lowest > MINUS_INFINITY)
    return draw_filtered(row, scale, task, scratch);
  return draw_any(row, scale, task.number, scratch);
}

// Places a token in a list of `count` (id, logarithm), of which `held` are filled, highest first; equals stay behind.
static void insert(int32_t* list, int count, int& held, int32_t id, float value) {
  int at = held < count ? held++ : count - 1;
  for (float before; at; at--) {
    memcpy(&before, list + 2 * at - 1, sizeof before);
    if (before >= value) break;
    list[2 * at] = list[2 * at - 2];
    list[2 * at + 1] = list[2 * at - 1];
  }
  list[2 * at] = id;
  memcpy(list + 2 * at + 1, &value, sizeof value);
}

INLINE float worst_of(const int32_t* list, int count, int held) {
  float worst = MINUS_INFINITY;
  if (held == count) memcpy(&worst, list + 2 * count - 1, sizeof worst);
  return worst;
}

// The `count` most likely ids and their logarithms: from the groups with the highest tops.
template <class Logs>
static void find_top(const Row& row, Logs log_of, int count, int32_t* list, int32_t* room) {
  if (!count) return;
  int held = 0;
  for (int64_t number = 0; number < row.num_groups; number++) {
    const float top = log_of(row.tops[number]);
    if (held < count || top > worst_of(room, count, held)) insert(room, count, held, 0, top);
  }
  // None below the last of so many tops is among so many tokens.
  const float bar = worst_of(room, count, held);
  held = 0;
  for (int64_t number = 0; number < row.num_groups; number++) {
    const float top = log_of(row.tops[number]);
    if (top < bar || (held == count && top <= worst_of(list, count, held))) continue;
    for (int column = 0; column < GROUP; column += LANES) {
      float logs[LANES];
      const Floats some = log_of(load(row.group(number) + column));
      store(logs, some);
      for (uint32_t set = set_lanes(some >= bar); set; set &= set - 1) {
        const int lane = __builtin_ctz(set);
        const int64_t id = number * GROUP + column + lane;
        if (id < row.size && (held < count || logs[lane] > worst_of(list, count, held)))
          insert(list, count, held, (int32_t)id, logs[lane]);
      }
    }
  }
  for (; held < count; held++) list[2 * held] = list[2 * held + 1] = 0;
}

// From 1; of equals the lower id comes first.
template <class Logs>
static int32_t rank_of(const Row& row, Logs log_of, int32_t token, float own) {
  int32_t rank = 1;
  for (int64_t number = 0; number < row.num_groups; number++) {
    if (!(log_of(row.tops[number]) >= own)) continue;
    for (int column = 0; column < GROUP; column += LANES) {
      const Floats logs = log_of(load(row.group(number) + column));
      const int64_t before = token - (number * GROUP + column);
      const uint32_t lower = before <= 0 ? 0 : before >= LANES ? ~0u : (1u << before) - 1;
      rank += __builtin_popcount(set_lanes(logs > own) | (set_lanes(logs == own) & lower));
    }
  }
  return rank;
}

template <class Scaled>
struct Logarithms {
  Scaled scale;
  float sum;

  float operator()(float x) const { return scale(x) - sum; }
  Floats operator()(Floats x) const { return scale(x) - splat(sum); }
};

static void write_log(int32_t* to, float value) {
  if (value < NEVER) value = NEVER;
  memcpy(to, &value, sizeof value);
}

template <class Scaled>
static void read_scaled(
    const RowsCall& call, const RowTask& task, const Row& row, Scaled scale, int32_t token, const RowScratch& scratch) {
  const Logarithms<Scaled> log_of{scale, (float)log(sum_pieces(row, scale, scratch.pieces))};
  const auto log_at = [&](int64_t id) { return log_of(row.group(id / GROUP)[id % GROUP]); };
  int32_t *line = call.lines + task.line, *list = line + 2, *of_ids = list + 2 * task.width;
  write_log(line, log_at(token));
  line[1] = rank_of(row, log_of, token, log_at(token));
  find_top(row, log_of, task.top, list, (int32_t*)scratch.candidates);
  for (int i = 0; i < task.top; i++) {
    float value;
    memcpy(&value, list + 2 * i + 1, sizeof value);
    write_log(list + 2 * i + 1, value);
  }
  for (int i = 0; i < task.num_ids; i++) {
    const int32_t id = call.read_ids[task.ids + i];
    write_log(of_ids + i, id < 0 || id >= row.size ? NEVER : log_at(id));
  }
}

static void run_task(const RowsCall& call, int number, int thread) {
  const RowTask& task = call.tasks[number];
  const RowScratch scratch(call.scratch + thread * RowScratch::bytes(call.size), call.size);
  const float* logits = call.logits + task.row * call.stride;
  const Row plain = row_of_logits(logits, call.size, scratch);
  const bool is_edited = task.flags & EDITED;
  const Row row = is_edited ? edited_row(call, task, plain, scratch) : plain;
  const float highest = is_edited ? highest_of(row) : find_tops(row);
  int32_t& token = call.tokens[number];
  if (task.flags & DRAWS) {
    if (!is_finite(highest)) token = is_edited && is_finite(find_tops(plain)) ? NO_CANDIDATE : NOT_DRAWN;
    else if (task.flags & GREEDY) token = first_of(row, highest);
    else if (task.temperature == 1) token = draw_scaled(row, Scale<NONE>(highest, 1), task, scratch);
    else token = draw_scaled(row, Scale<AFTER>(highest, task.temperature), task, scratch);
  }
  // Of a row that is not drawn nothing is read: the numbers may not even be some.
  if (!(task.flags & READS) || token < 0) return;
  if (!(task.flags & PROCESSED))
    return read_scaled(call, task, plain, Scale<NONE>(is_edited ? find_tops(plain) : highest, 1), token, scratch);
  if (task.flags & GREEDY || task.temperature == 1)
    return read_scaled(call, task, row, Scale<NONE>(highest, 1), token, scratch);
  read_scaled(call, task, row, Scale<BEFORE>(highest, task.temperature), token, scratch);
}

static bool run_tasks(const RowsCall& call, const Turn& turn) {
  return turn.each(0, call.num_tasks, [&](int number) { run_task(call, number, turn.thread); });
}

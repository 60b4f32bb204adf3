// Attention over pages, causal or over whole sequences, with everything between the projected queries, keys and values
// and the result: norms of heads, rotation, writing of pages.
//
// Positions are reduced in splits of 64 counted from 0, one after the other, with a running maximum (online softmax).
// Within a split each sum has one accumulator. A position that a row does not see has weight 0, which adds nothing to a
// sum, and nothing is read behind the last position that the row's block sees; so a row's bits depend neither on the
// chunk that it comes in nor on what else is in the batch, and numbers left by former owners of a page do no harm.
#pragma once
#include "norm.h"

constexpr int SPLIT = 64;
constexpr int MAX_HEAD_DIM = 256;
constexpr int MAX_BLOCK_ROWS = 192;  // query heads of all tokens of a block: a split is gathered once for all of them

struct AttendCall {
  const float *q, *k, *v;            // [rows] of heads, `stride` numbers apart
  void* out;                         // [rows, heads, head_dim], as products read them
  int64_t stride;
  const float *q_norm, *k_norm;      // [head_dim], or null: not normed
  const float *cos, *sin;            // [positions, head_dim], sines of the first half negated; or null: not rotated
  char* pool;                        // the layer's keys in page 0
  int64_t page_bytes, value_bytes;   // from page to page, and from a page's keys to its values
  const int32_t* spans;              // [][4]: first position, tokens, first of `pages`, first row
  const int32_t* pages;
  const int32_t* blocks;             // [][3]: span, first token, tokens
  int32_t num_blocks, has_chunks;    // without chunks each span is one token
  int32_t page_size, heads, kv_heads, head_dim, window;
  int32_t sees_all;                  // each position sees its whole span, which begins at 0
  float eps, scale;
};

struct Block {
  const int32_t* pages;
  int start, first, tokens, row, kv_head;   // positions first .. first + tokens - 1; `start` is the span's first
  int end;                                  // the span's
};

// Of a chunk all blocks for one KV head come first, then those for the next: one head's keys and values of 3,000
// positions, 768 KB, stay in the second-level cache. Single tokens read pages of their own, all heads of a page together.
static Block block_of(const AttendCall& call, int item) {
  const int number = call.has_chunks ? item % call.num_blocks : item / call.kv_heads;
  const int kv_head = call.has_chunks ? item / call.num_blocks : item % call.kv_heads;
  const int32_t* block = call.blocks + 3 * number;
  const int32_t* span = call.spans + 4 * block[0];
  return {call.pages + span[2], span[0],          span[0] + block[1],  block[2],
          span[3] + block[1],   kv_head, span[0] + span[1]};
}

INLINE int padded_dim(int dim) { return (dim + 15) / 16 * 16; }

template <class Scalar>
INLINE Scalar* cell_of(const AttendCall& call, const Block& block, int position) {
  char* page = call.pool + block.pages[position / call.page_size] * call.page_bytes;
  return (Scalar*)page + (position % call.page_size * call.kv_heads + block.kv_head) * (int64_t)call.head_dim;
}

// One head of queries or keys as attention multiplies it: normed and rotated, if at all.
static void prepare_head(const AttendCall& call, const float* from, const float* norm, int position, float* to) {
  const int dim = call.head_dim, half = dim / 2;
  float own[MAX_HEAD_DIM], *before = call.cos ? own : to;
  if (norm) norm_row(from, norm, before, dim, call.eps);
  else memcpy(before, from, dim * sizeof(float));
  if (!call.cos) return;
  const float *cos = call.cos + (int64_t)position * dim, *sin = call.sin + (int64_t)position * dim;
  for (int begin = 0; begin < dim; begin += half)
    for (int i = 0; i < half; i += LANES) {
      const int count = half - i < LANES ? half - i : LANES, at = begin + i, other = half - begin + i;
      const Floats turned = load_first(before + other, count) * load_first(sin + at, count);
      store_first(to + at, multiply_add(load_first(before + at, count), load_first(cos + at, count), turned), count);
    }
}

template <class Scalar>
static void write_block(const AttendCall& call, const Block& block) {
  const int dim = call.head_dim;
  const int64_t to_value = call.value_bytes / (int64_t)sizeof(Scalar);
  float head[MAX_HEAD_DIM];
  for (int token = 0; token < block.tokens; token++) {
    const int position = block.first + token, row = block.row + token;
    const int64_t at = row * call.stride + block.kv_head * dim;
    Scalar* key = cell_of<Scalar>(call, block, position);
    prepare_head(call, call.k + at, call.k_norm, position, head);
    for (int i = 0; i < dim; i += LANES) {
      const int count = dim - i < LANES ? dim - i : LANES;
      store_first(key + i, load(head + i), count);
      store_first(key + to_value + i, load_first(call.v + at + i, count), count);
    }
  }
  // A page that the span begins gets zeros behind the span's end: whatever reads it later may multiply them by 0.
  const int last = block.end - 1;
  if (block.first + block.tokens != block.end || last / call.page_size * call.page_size < block.start) return;
  for (int position = block.end; position % call.page_size; position++) {
    // Counted from the span's last position, because the page table may end with it.
    Scalar* key = cell_of<Scalar>(call, block, last) + (position - last) * (int64_t)call.kv_heads * dim;
    memset(key, 0, dim * sizeof(Scalar));
    memset(key + to_value, 0, dim * sizeof(Scalar));
  }
}

// What one thread needs for one block.
struct Scratch {
  alignas(64) float keys[MAX_HEAD_DIM * SPLIT];     // [head_dim][SPLIT]
  alignas(64) float values[SPLIT * MAX_HEAD_DIM];   // [SPLIT][padded head_dim], as are queries and sums
  alignas(64) float queries[MAX_BLOCK_ROWS * MAX_HEAD_DIM];
  alignas(64) float sums[MAX_BLOCK_ROWS * MAX_HEAD_DIM];
  alignas(64) float weights[MAX_BLOCK_ROWS * SPLIT];
  float highest[MAX_BLOCK_ROWS], total[MAX_BLOCK_ROWS];
};

// Transposes eight rows of eight words.
INLINE void transpose_eight(__m256 (&r)[8]) {
  __m256 a[8], b[8];
  UNROLL for (int i = 0; i < 4; i++) {
    a[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  UNROLL for (int i = 0; i < 2; i++) {
    b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
    b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xee);
    b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
    b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xee);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    r[i] = _mm256_permute2f128_ps(b[i], b[4 + i], 0x20);
    r[4 + i] = _mm256_permute2f128_ps(b[i], b[4 + i], 0x31);
  }
}

// How many numbers of a key are transposed at a time: eight words of them.
template <class Scalar>
constexpr int NUMBERS_AT_ONCE = 32 / sizeof(Scalar);

// Stores eight keys' numbers of one word of theirs, or of the two that it has of bfloat16.
INLINE void store_numbers(float*, __m256 words, float* to) { _mm256_storeu_ps(to, words); }
INLINE void store_numbers(Bfloat16*, __m256 words, float* to) {
  const __m256i pairs = _mm256_castps_si256(words);
  _mm256_storeu_ps(to, _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)));
  _mm256_storeu_ps(to + SPLIT, _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000))));
}

// Keys and values of `count` positions from `base` on, as float32; keys behind them are zeros.
template <class Scalar>
static void gather(const AttendCall& call, const Block& block, int base, int count, Scratch& scratch) {
  const int dim = call.head_dim, width = padded_dim(dim);
  const int64_t to_value = call.value_bytes / (int64_t)sizeof(Scalar);
  constexpr int AT_ONCE = NUMBERS_AT_ONCE<Scalar>;
  for (int position = 0; position < count; position += 8) {
    const Scalar* rows[8];
    const int valid = count - position < 8 ? count - position : 8;
    for (int i = 0; i < valid; i++) {
      rows[i] = cell_of<Scalar>(call, block, base + position + i);
      float* value = scratch.values + (position + i) * width;
      for (int d = 0; d < dim; d += LANES)
        store_first(value + d, load_first(rows[i] + to_value + d, dim - d < LANES ? dim - d : LANES), LANES);
    }
    for (int d = 0; d < dim; d += AT_ONCE) {
      __m256 words[8];
      const bool is_whole = valid == 8 && dim - d >= AT_ONCE;
      for (int i = 0; i < 8; i++) {
        Scalar some[AT_ONCE] = {};
        if (!is_whole && i < valid) memcpy(some, rows[i] + d, (dim - d < AT_ONCE ? dim - d : AT_ONCE) * sizeof(Scalar));
        words[i] = load_as<__m256>(is_whole ? rows[i] + d : some);
      }
      transpose_eight(words);
      for (int i = 0; i < 8; i++)
        store_numbers((Scalar*)nullptr, words[i], scratch.keys + (d + i * AT_ONCE / 8) * SPLIT + position);
    }
  }
}

// Has positions `first .. last - 1` read from memory, for the split after this one.
template <class Scalar>
INLINE void prefetch_cells(const AttendCall& call, const Block& block, int first, int last) {
  const int num_bytes = call.head_dim * (int)sizeof(Scalar);
  for (int position = first; position < last; position++) {
    const char* key = (const char*)cell_of<Scalar>(call, block, position);
    for (int at = 0; at < num_bytes; at += 64) {
      _mm_prefetch(key + at, _MM_HINT_T1);
      _mm_prefetch(key + call.value_bytes + at, _MM_HINT_T1);
    }
  }
}

// Turns a row's scores of one split into weights, of positions `seen .. end - 1` of the split, and scales the sums so
// far down if the maximum has grown. `IS_WHOLE`: all are seen, which is most splits of a long prompt.
template <bool IS_WHOLE>
INLINE void weigh_seen(int seen, int end, int row, int width, Scratch& scratch) {
  float* scores = scratch.weights + row * SPLIT;
  constexpr int VECTORS = SPLIT / LANES;
  Floats score[VECTORS], most = splat(-__builtin_inff());
  UNROLL for (int i = 0; i < VECTORS; i++) {
    score[i] = load(scores + i * LANES);
    most = larger(most, IS_WHOLE ? score[i] : keep_lanes(score[i], seen - i * LANES, end - i * LANES, -__builtin_inff()));
  }
  const float before = scratch.highest[row], in_split = largest_lane(most);
  const float highest = before > in_split ? before : in_split;
  Floats sum = {};
  UNROLL for (int i = 0; i < VECTORS; i++) {
    Floats weight = exponential(score[i] - highest);
    if (!IS_WHOLE) weight = keep_lanes(weight, seen - i * LANES, end - i * LANES, 0.0f);
    store(scores + i * LANES, weight);
    sum = sum + weight;
  }
  if (highest > before && before > -__builtin_inff()) {
    const Floats factor = exponential(splat(before - highest));
    float* sums = scratch.sums + row * width;
    for (int d = 0; d < width; d += LANES) store(sums + d, load(sums + d) * factor);
    scratch.total[row] *= factor[0];
  }
  scratch.highest[row] = highest;
  scratch.total[row] += sum_lanes(sum);
}

// The same for a row that sees positions up to `position`, in the split from `base` on.
INLINE void weigh_row(const AttendCall& call, int position, int base, int row, int width, Scratch& scratch) {
  const int seen = call.window && position - call.window + 1 > base ? position - call.window + 1 - base : 0;
  const int end = position + 1 - base < SPLIT ? position + 1 - base : SPLIT;
  if (end <= seen) memset(scratch.weights + row * SPLIT, 0, SPLIT * sizeof(float));
  else if (seen == 0 && end == SPLIT) weigh_seen<true>(seen, end, row, width, scratch);
  else weigh_seen<false>(seen, end, row, width, scratch);
}

template <class Scalar>
static void attend_block(const AttendCall& call, const Block& block) {
  static thread_local Scratch scratch;
  const int dim = call.head_dim, width = padded_dim(dim), group = call.heads / call.kv_heads;
  const int rows = block.tokens * group, end = call.sees_all ? block.end : block.first + block.tokens;
  for (int row = 0; row < rows; row++) {
    float* query = scratch.queries + row * width;
    const int token = row / group, head = block.kv_head * group + row % group;
    prepare_head(call, call.q + (block.row + token) * call.stride + head * dim, call.q_norm, block.first + token, query);
    for (int d = 0; d < dim; d++) query[d] *= call.scale;
    scratch.highest[row] = -__builtin_inff();
    scratch.total[row] = 0;
  }
  const int lowest = call.window && block.first > call.window - 1 ? block.first - (call.window - 1) : 0;
  const int first_base = lowest / SPLIT * SPLIT;
  for (int base = first_base; base < end; base += SPLIT) {
    const int count = end - base < SPLIT ? end - base : SPLIT, next = base + SPLIT;
    const int ahead = end - next < SPLIT ? end - next : SPLIT;
    gather<Scalar>(call, block, base, count, scratch);
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int t = 0; t < tiles; t++) {
      const int row = rows * t / tiles, tile = rows * (t + 1) / tiles - row;
      float* weights = scratch.weights + row * SPLIT;
      multiply<Float32>(tile, scratch.queries + row * width, width, (const char*)scratch.keys, Float32::STEP_BYTES, dim, weights,
                        SPLIT, SPLIT / LANES, true);
      for (int r = row; r < row + tile; r++)
        weigh_row(call, call.sees_all ? end - 1 : block.first + r / group, base, r, width, scratch);
      multiply<Float32>(tile, weights, SPLIT, (const char*)scratch.values, width * 4, count, scratch.sums + row * width,
                        width, width / LANES, base == first_base);
      if (ahead > 0) prefetch_cells<Scalar>(call, block, next + ahead * t / tiles, next + ahead * (t + 1) / tiles);
    }
  }
  for (int row = 0; row < rows; row++) {
    const int64_t head = block.kv_head * group + row % group;
    const int64_t at = ((block.row + row / group) * (int64_t)call.heads + head) * dim;
    for (int d = 0; d < dim; d += LANES) {
      const Floats result = load(scratch.sums + row * width + d) / scratch.total[row];
      store_first((RowOf<Scalar>*)call.out + at + d, result, dim - d < LANES ? dim - d : LANES);
    }
  }
}

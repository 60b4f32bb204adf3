// A step of a model: a list of operations, recorded once, over as many rows as the step has.
//
// Each operation is one phase of one job (threads.h). The caller knows all numbers of rows before the step begins, so
// it publishes each phase's number of items beforehand. Hidden states, the rows of queries, keys and values, and logits
// are float32; what products read is rounded once to the model's dtype, and kept as `Rows` says. A row's numbers do not
// depend on the other rows: every operation works on single rows, or is a product or attention, where that holds too.
#pragma once
#include "attention.h"
#include "mixture.h"

enum Kind {
  EMBED, NORM, CONVERT, PRODUCT, GATED, WRITE, ATTEND, SELECT, HEAD, DRAW, ROUTE, GATHER, EXPERTS, COMBINE, POOL,
  LAYER_NORM, ACTIVATED
};

struct Buffer {
  void* at;
  int64_t width;                   // numbers of a row
};

struct Operation {
  int32_t kind;
  int32_t is_selected;             // over the rows that are sampled, else over all
  int32_t x, y;                    // buffers that are read and written
  int32_t add;                     // buffer, or -1
  int32_t norm;                    // of products: the NORM before, which is computed here if rows are few, or -1; `x`
                                   // is what it writes. Of a NORM: that product, or -1
  int32_t activation;              // of GATED and ACTIVATED
  int32_t attend;                  // of WRITE and ATTEND: index
  int32_t choices;                 // of GATHER and COMBINE: buffer of Choice [rows][top_k]
  int32_t num_experts, top_k;      // of ROUTE to COMBINE
  int32_t is_normalized;           // of ROUTE: shares of one among those chosen
  int32_t is_int8;                 // the weight; that of EMBED is then packed, too
  int64_t n, k;                    // outputs and inputs of a product; of a norm its width, and where in a row it begins
  const Operation* experts;        // of EXPERTS, [num_experts]: a PRODUCT or GATED for the gathered rows
  const void* weight;              // packed, except of EMBED (but see is_int8), norms and POOL (or null)
  const float* bias;               // or null; of GATED [2][n]
  const void *positions, *types;   // of EMBED: tables of rows that are added (see Step), or null
  float eps, scale;
};

// The model's operations, its memory, and for the current step how many items each phase has.
struct Program {
  const Operation* operations;
  const Buffer* buffers;
  AttendCall* attends;
  int32_t* counts;                 // [operations]
  char* scratch;                   // [threads][scratch_bytes]: a tag, then rows that this thread has normed itself
  int64_t scratch_bytes;
  float* best;                     // [rows][2 * panels of the head]: highest logits, then their columns
  int32_t *chosen, *ends;          // [most experts + 1] and [most experts]: see group_by_expert
  int32_t num_attends, dtype;
  int32_t number;                  // of the step, for the tags
};

struct Step {
  char* pool;                      // page 0
  const int32_t* token_ids;        // [rows]
  const int32_t* places;           // [rows][2]: the row of `positions` and that of `types` to add; null if there are none
  const int32_t* spans;            // [spans][4], see AttendCall
  const int32_t* pages;
  const int32_t* sampled;          // [sampled]: their rows
  int32_t* drawn;                  // [sampled]: the most likely token, lowest id first; -1: a NaN, an inf, or all -inf
  float* logits;                   // [sampled, vocab], or null: not requested
  int32_t* blocks;                 // room for [rows][3]
  const int32_t* pooled_rows;      // [pooled]
  float* pooled;                   // [pooled, n of POOL]: these rows of the last hidden states, normed
  int32_t num_rows, num_spans, num_sampled, num_pooled;
};

struct StepCall {
  const Program* program;
  const Step* step;
  int32_t first, num_phases;       // of the operations, each of which is a phase
};

// With so few rows each thread norms them itself, which is faster than waiting for each other once more.
constexpr int FEW_ROWS = 2;

INLINE int rows_per_item(int rows) { return rows > 64 ? 16 : rows > 8 ? 4 : 1; }

template <class Scalar>
INLINE Scalar* row_of(const Program& program, int buffer, int64_t row) {
  return (Scalar*)program.buffers[buffer].at + row * program.buffers[buffer].width;
}

template <class Scalar>
static void embed_row(const Program& program, const Operation& one, const Step& step, int row) {
  float* to = row_of<float>(program, one.y, row);
  const Scalar* from = (const Scalar*)one.weight + step.token_ids[row] * one.n;
  if (one.is_int8) unpack_row<Scalar>(one.weight, one.n, step.token_ids[row], one.scale, to);
  else
    for (int64_t i = 0; i < one.n; i += LANES) {
      const int count = one.n - i < LANES ? (int)(one.n - i) : LANES;
      store_first(to + i, load_first(from + i, count) * one.scale, count);
    }
  if (!one.positions) return;
  const Scalar* position = (const Scalar*)one.positions + step.places[2 * row] * one.n;
  const Scalar* type = (const Scalar*)one.types + step.places[2 * row + 1] * one.n;
  for (int64_t i = 0; i < one.n; i += LANES) {
    const int count = one.n - i < LANES ? (int)(one.n - i) : LANES;
    store_first(to + i, load_first(to + i, count) + load_first(type + i, count) + load_first(position + i, count), count);
  }
}

template <class Scalar>
static void norm_one(const Program& program, const Operation& one, int row) {
  const float* x = row_of<float>(program, one.x, row) + one.k;
  const float* weight = (const float*)one.weight;
  if (one.add < 0 && one.x != one.y) return norm_row(x, weight, row_of<RowOf<Scalar>>(program, one.y, row), one.n, one.eps);
  float* y = row_of<float>(program, one.y, row) + one.k;
  norm_row(x, weight, y, one.n, one.eps, one.add < 0 ? nullptr : row_of<float>(program, one.add, row));
}

static void layer_norm_one(const Program& program, const Operation& one, int row) {
  const float* x = row_of<float>(program, one.x, row);
  layer_norm_row(x, (const float*)one.weight, one.bias, row_of<float>(program, one.y, row), one.n, one.eps);
}

static void pool_row(const Program& program, const Operation& one, const Step& step, int row) {
  // From the float32 states: what products read is rounded, and in one build kept in pairs.
  const float* x = row_of<float>(program, one.x, step.pooled_rows[row]);
  float* y = step.pooled + row * one.n;
  if (one.weight) norm_row(x, (const float*)one.weight, y, one.n, one.eps);
  else memcpy(y, x, one.n * sizeof(float));
}

template <class Scalar>
static void convert_row(const Program& program, const Operation& one, int row) {
  const float* x = row_of<float>(program, one.x, row);
  RowOf<Scalar>* y = row_of<RowOf<Scalar>>(program, one.y, row);
  for (int64_t i = 0; i < one.n; i += LANES) {
    const int count = one.n - i < LANES ? (int)(one.n - i) : LANES;
    store_first(y + i, load_first(x + i, count), count);
  }
}

INLINE void finish_product(const Program& program, const Operation& one, int64_t panel, int64_t row, const float* sums) {
  float* y = row_of<float>(program, one.y, row);
  for (int column = 0; column < PANEL; column += LANES) {
    const int64_t n = panel * PANEL + column;
    if (n >= one.n) return;
    const int count = one.n - n < LANES ? (int)(one.n - n) : LANES;
    Floats value = load(sums + column);
    if (one.bias) value = value + load_first(one.bias + n, count);
    if (one.add >= 0) value = value + load_first(row_of<float>(program, one.add, row) + n, count);
    store_first(y + n, value, count);
  }
}

template <class Scalar>
INLINE void finish_gated(const Program& program, const Operation& one, int64_t panel, int64_t row, const float* sums) {
  const int outputs = panel_outputs(true);
  RowOf<Scalar>* y = row_of<RowOf<Scalar>>(program, one.y, row);
  for (int column = 0; column < outputs; column += LANES) {
    const int64_t n = panel * outputs + column;
    if (n >= one.n) return;
    const int count = one.n - n < LANES ? (int)(one.n - n) : LANES;
    Floats gate = load(sums + column), up = load(sums + outputs + column);
    if (one.bias) {
      gate = gate + load_first(one.bias + n, count);
      up = up + load_first(one.bias + one.n + n, count);
    }
    store_first(y + n, activated(gate, one.activation) * up, count);
  }
}

template <class Scalar>
INLINE void finish_activated(
    const Program& program, const Operation& one, int64_t panel, int64_t row, const float* sums) {
  RowOf<Scalar>* y = row_of<RowOf<Scalar>>(program, one.y, row);
  for (int column = 0; column < PANEL; column += LANES) {
    const int64_t n = panel * PANEL + column;
    if (n >= one.n) return;
    const int count = one.n - n < LANES ? (int)(one.n - n) : LANES;
    Floats value = load(sums + column);
    if (one.bias) value = value + load_first(one.bias + n, count);
    store_first(y + n, activated(value, one.activation), count);
  }
}

// The highest logit of a panel and its first column; NaN if the panel has one.
INLINE void finish_head(
    const Program& program, const Operation& one, const Step& step, int64_t panel, int64_t row, float* sums) {
  const int count = one.n - panel * PANEL < PANEL ? (int)(one.n - panel * PANEL) : PANEL;
  for (int column = count; column < PANEL; column++) sums[column] = -__builtin_inff();
  if (one.bias)
    for (int column = 0; column < count; column++) sums[column] += one.bias[panel * PANEL + column];
  if (step.logits) memcpy(step.logits + row * one.n + panel * PANEL, sums, count * sizeof(float));
  Floats highest = splat(-__builtin_inff());
  Ints is_bad = {};
  for (int column = 0; column < PANEL; column += LANES) {
    const Floats value = load(sums + column);
    highest = larger(highest, value);
    is_bad |= value != value;
  }
  float* best = program.best + row * 2 * num_panels(one.n, false);
  const float top = largest_lane(highest);
  int column = 0;
  for (; column < PANEL; column += LANES) {
    const int lane = first_set(load(sums + column) == top);
    if (lane < LANES) {
      column += lane;
      break;
    }
  }
  best[panel] = first_set(is_bad) < LANES ? __builtin_nanf("") : top;
  ((int32_t*)best)[num_panels(one.n, false) + panel] = (int32_t)(panel * PANEL) + column;
}

static void draw_row(const Program& program, const Operation& one, const Step& step, int row) {
  const int64_t panels = num_panels(one.n, false);
  const float* best = program.best + row * 2 * panels;
  const int32_t* columns = (const int32_t*)(best + panels);
  float highest = -__builtin_inff();
  int32_t token = -1;
  for (int64_t panel = 0; panel < panels; panel++) {
    if (best[panel] != best[panel] || best[panel] == __builtin_inff()) {
      token = -1;
      break;
    }
    if (best[panel] > highest) {
      highest = best[panel];
      token = columns[panel];
    }
  }
  step.drawn[row] = token;
}

// The rows that a product reads: written by an earlier phase, or normed now by this thread, once for all its items.
template <class Scalar>
INLINE const void* product_rows(const Program& program, const Operation& one, int rows, int thread) {
  if (one.norm < 0 || program.counts[one.norm]) return program.buffers[one.x].at;
  char* scratch = program.scratch + thread * program.scratch_bytes;
  RowOf<Scalar>* normed = (RowOf<Scalar>*)(scratch + 64);
  const int64_t tag = ((int64_t)program.number << 32) | (uint32_t)one.norm;
  if (*(int64_t*)scratch != tag) {
    const Operation& norm = program.operations[one.norm];
    for (int row = 0; row < rows; row++)
      norm_row(row_of<float>(program, norm.x, row), (const float*)norm.weight, normed + row * norm.n, norm.n, norm.eps);
    *(int64_t*)scratch = tag;
  }
  return normed;
}

template <class Type>
static void run_experts(const Program& program, const Operation& one, int item) {
  typedef typename Type::Scalar Scalar;
  const bool is_gated = one.experts->kind == GATED;
  const int panels = (int)num_panels(one.n, is_gated), number = item / panels;
  if (number >= program.chosen[0]) return;
  const int first = number ? program.ends[program.chosen[number]] : 0, expert = program.chosen[number + 1];
  const Operation& own = one.experts[expert];
  const void* x = row_of<RowOf<Scalar>>(program, own.x, first);
  const int rows = program.ends[expert] - first;
  multiply_panel<Type>(x, own.weight, own.k, item % panels, 0, rows, [&](int64_t row, float* sums) {
    if (is_gated) finish_gated<Scalar>(program, own, item % panels, first + row, sums);
    else finish_product(program, own, item % panels, first + row, sums);
  });
}

// One thread for all rows: 512 of them, with 128 experts, take a hundredth of the time of their products.
template <class Scalar>
static void route_rows(const Program& program, const Operation& one, int rows) {
  Choice* choices = row_of<Choice>(program, one.y, 0);
  for (int row = 0; row < rows; row++)
    choose_experts<Scalar>(
        row_of<float>(program, one.x, row), one.num_experts, one.top_k, one.is_normalized, choices + row * one.top_k);
  group_by_expert(choices, rows * one.top_k, one.num_experts, program.chosen, program.ends);
}

template <class Row>
static void gather_row(const Program& program, const Operation& one, int row) {
  const Choice* choices = row_of<Choice>(program, one.choices, row);
  for (int i = 0; i < one.top_k; i++)
    memcpy(row_of<Row>(program, one.y, choices[i].place), row_of<Row>(program, one.x, row), one.n * sizeof(Row));
}

static void combine_row(const Program& program, const Operation& one, int row) {
  const Choice* choices = row_of<Choice>(program, one.choices, row);
  float* y = row_of<float>(program, one.y, row);
  for (int64_t n = 0; n < one.n; n += LANES) {
    const int count = one.n - n < LANES ? (int)(one.n - n) : LANES;
    Floats sum = {};
    for (int i = 0; i < one.top_k; i++)
      sum = multiply_add(
          load_first(row_of<float>(program, one.x, choices[i].place) + n, count), splat(choices[i].share), sum);
    store_first(y + n, one.add < 0 ? sum : sum + load_first(row_of<float>(program, one.add, row) + n, count), count);
  }
}

template <class Type>
static void run_product(const Program& program, const Operation& one, const Step& step, int item, int thread) {
  typedef typename Type::Scalar Scalar;
  const int rows = one.is_selected ? step.num_sampled : step.num_rows;
  const int panels = (int)num_panels(one.n, one.kind == GATED);
  const int parts = program.counts[&one - program.operations] / panels;
  const void* x = product_rows<Scalar>(program, one, rows, thread);
  multiply_part<Type>(x, one.weight, one.k, rows, panels, parts, item, [&](int64_t panel, int64_t row, float* sums) {
    if (one.kind == GATED) finish_gated<Scalar>(program, one, panel, row, sums);
    else if (one.kind == ACTIVATED) finish_activated<Scalar>(program, one, panel, row, sums);
    else if (one.kind == HEAD) finish_head(program, one, step, panel, row, sums);
    else finish_product(program, one, panel, row, sums);
  });
}

INLINE int rows_of(const Operation& one, const Step& step) {
  if (one.kind == POOL) return step.num_pooled;
  return one.is_selected ? step.num_sampled : step.num_rows;
}

template <class Scalar>
static void run_rows(const Program& program, const Operation& one, const Step& step, int item) {
  const int rows = rows_of(one, step), each = rows_per_item(rows);
  for (int row = item * each; row < rows && row < (item + 1) * each; row++) switch (one.kind) {
      case EMBED: embed_row<Scalar>(program, one, step, row); break;
      case NORM: norm_one<Scalar>(program, one, row); break;
      case CONVERT: convert_row<Scalar>(program, one, row); break;
      case SELECT:
        memcpy(row_of<float>(program, one.y, row), row_of<float>(program, one.x, step.sampled[row]), one.n * sizeof(float));
        break;
      case GATHER: gather_row<RowOf<Scalar>>(program, one, row); break;
      case COMBINE: combine_row(program, one, row); break;
      case POOL: pool_row(program, one, step, row); break;
      case LAYER_NORM: layer_norm_one(program, one, row); break;
      default: draw_row(program, one, step, row);
    }
}

template <class Type>
static void run_item(const Program& program, const Step& step, int number, int item, int thread) {
  typedef typename Type::Scalar Scalar;
  const Operation& one = program.operations[number];
  switch (one.kind) {
    case PRODUCT:
    case GATED:
    case ACTIVATED:
    case HEAD:
      if (one.is_int8) return run_product<Int8Of<Scalar>>(program, one, step, item, thread);
      return run_product<Type>(program, one, step, item, thread);
    case WRITE: return write_block<Scalar>(program.attends[one.attend], block_of(program.attends[one.attend], item));
    case ATTEND: {
      const AttendCall& call = program.attends[one.attend];
      const Block block = block_of(call, item);
      if (!call.has_chunks) write_block<Scalar>(call, block);
      return attend_block<Scalar>(call, block);
    }
    case ROUTE: return route_rows<Scalar>(program, one, one.is_selected ? step.num_sampled : step.num_rows);
    case EXPERTS:
      if (one.experts->is_int8) return run_experts<Int8Of<Scalar>>(program, one, item);
      return run_experts<Type>(program, one, item);
    default: return run_rows<Scalar>(program, one, step, item);
  }
}

static bool run_step(const StepCall& call, const Turn& turn) {
  // Until it has taken an item, a thread may read nothing but the call: the step may be over, and its memory gone.
  for (int phase = 0; phase < call.num_phases; phase++)
    if (!turn.each_published(phase, turn.phases ? nullptr : call.program->counts + call.first, [&](int item) {
          const Program& program = *call.program;
          const int number = call.first + phase;
          if (program.dtype == BFLOAT16) run_item<PairsOfBfloat16>(program, *call.step, number, item, turn.thread);
          else run_item<Float32>(program, *call.step, number, item, turn.thread);
        }))
      return false;
  return true;
}

static int count_items(const Program& program, const Operation& one, const Step& step, int num_blocks, int threads) {
  const int rows = rows_of(one, step);
  if (!rows) return 0;
  const int panels = (int)num_panels(one.n, one.kind == GATED);
  switch (one.kind) {
    case PRODUCT:
    case GATED:
    case ACTIVATED:
    case HEAD: return panels * parts_of_panel(panels, rows, threads);
    case WRITE: return program.attends[one.attend].has_chunks ? num_blocks * program.attends[one.attend].kv_heads : 0;
    case ATTEND: return num_blocks * program.attends[one.attend].kv_heads;
    case ROUTE: return 1;
    case EXPERTS: {
      const int most = rows * one.top_k < one.num_experts ? rows * one.top_k : one.num_experts;
      return most * (int)num_panels(one.n, one.experts->kind == GATED);
    }
    case NORM:
      // The `norm` of a NORM is the product that can compute it itself.
      if (one.norm >= 0 && rows <= FEW_ROWS) return 0;
      [[fallthrough]];
    default: return (rows + rows_per_item(rows) - 1) / rows_per_item(rows);
  }
}

// Cuts the spans into blocks of at most `tokens` tokens, for which a thread has room; returns how many.
static int cut_blocks(const Step& step, int tokens, int32_t* has_chunks) {
  int num_blocks = 0;
  *has_chunks = 0;
  for (int span = 0; span < step.num_spans; span++) {
    const int length = step.spans[4 * span + 1];
    *has_chunks |= length > 1;
    for (int first = 0; first < length; first += tokens) {
      int32_t* block = step.blocks + 3 * num_blocks++;
      block[0] = span;
      block[1] = first;
      block[2] = length - first < tokens ? length - first : tokens;
    }
  }
  return num_blocks;
}

// Tokens of a block of a chunk: as many as a thread has room for, or fewer if there would be too few blocks for all
// threads. At least 16: with 21 of three heads, gathering a split took a quarter of the time.
INLINE int tokens_of_block(const AttendCall& call, int rows, int threads) {
  const int most = MAX_BLOCK_ROWS / (call.heads / call.kv_heads);
  const int64_t fair = (int64_t)rows * call.kv_heads / (4 * threads);
  const int least = most < 16 ? most : 16;
  return fair < least ? least : fair < most ? (int)fair : most;
}

// Computes operations first .. last - 1, after all before them: the whole step, or a part between two sums over ranks.
static void compute_step(Program& program, const Step& step, int first, int last) {
  const int threads = __atomic_load_n(&pool.threads, __ATOMIC_RELAXED);
  int num_blocks = 0;
  for (int i = 0; i < program.num_attends; i++) {
    AttendCall& call = program.attends[i];
    if (i == 0) num_blocks = cut_blocks(step, tokens_of_block(call, step.num_rows, threads), &call.has_chunks);
    call.has_chunks = program.attends[0].has_chunks;
    call.pool = step.pool + 2 * i * call.value_bytes;
    call.spans = step.spans;
    call.pages = step.pages;
    call.blocks = step.blocks;
    call.num_blocks = num_blocks;
  }
  program.number++;
  for (int i = first; i < last; i++)
    program.counts[i] = count_items(program, program.operations[i], step, num_blocks, threads);
  run_job(run_step, StepCall{&program, &step, first, last - first}, last - first, program.counts + first);
}

// A feed-forward layer of experts (Shazeer et al. 2017): which of them each row goes through, and the rows of each.
//
// How many rows an expert has is known only in the middle of a step, but helpers must know a phase's number of items
// before (threads.h). So items are counted for as many experts as can be chosen, and those beyond the chosen are empty.
#pragma once
#include "norm.h"

// One of a row's experts: its number, its share in the row's result, and the row's place among all gathered rows.
struct Choice {
  int32_t expert;
  float share;
  int32_t place;
};

// The experts with a row's highest scores, of equal ones the first, in the order of their numbers, which is the order
// in which their results are added up, whatever the other rows choose. A score that is NaN makes all shares NaN.
template <class Scalar>
static void choose_experts(const float* scores, int num_experts, int top_k, bool is_normalized, Choice* found) {
  for (int expert = 0; expert < num_experts; expert++) {
    int at = expert < top_k ? expert : top_k;
    for (; at && scores[expert] > found[at - 1].share; at--)
      if (at < top_k) found[at] = found[at - 1];
    if (at < top_k) found[at] = {expert, scores[expert], 0};
  }
  const float highest = found[0].share;
  Floats sums = {};
  for (int i = 0; i < num_experts; i += LANES) {
    const int count = num_experts - i < LANES ? num_experts - i : LANES;
    sums = sums + keep_lanes(exponential(load_first(scores + i, count) - highest), 0, count, 0.0f);
  }
  const float all = sum_lanes(sums);
  float chosen = 0;
  for (int i = 0; i < top_k; i++) chosen += found[i].share = exponential(splat(found[i].share - highest))[0] / all;
  for (int i = 0; i < top_k; i++) {
    // Rounded as in training.
    Scalar share;
    store_first(&share, splat(is_normalized ? found[i].share / chosen : found[i].share), 1);
    Choice one = {found[i].expert, load_first(&share, 1)[0], 0};
    int at = i;
    for (; at && found[at - 1].expert > one.expert; at--) found[at] = found[at - 1];
    found[at] = one;
  }
}

// Gives each choice its place, those of one expert side by side. `chosen`: how many experts have rows, then their
// numbers; `ends`, [experts]: the place behind the last row of each.
static void group_by_expert(Choice* choices, int num_choices, int num_experts, int32_t* chosen, int32_t* ends) {
  memset(ends, 0, num_experts * sizeof *ends);
  for (int i = 0; i < num_choices; i++) ends[choices[i].expert]++;
  chosen[0] = 0;
  for (int expert = 0, begin = 0; expert < num_experts; expert++) {
    const int rows = ends[expert];
    if (rows) chosen[++chosen[0]] = expert;
    ends[expert] = begin;
    begin += rows;
  }
  for (int i = 0; i < num_choices; i++) choices[i].place = ends[choices[i].expert]++;
}

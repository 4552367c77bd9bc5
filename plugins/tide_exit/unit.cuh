// A unit of work, one block's: the states of a few slots times some rows and columns of a matrix, and such units' sums.
//
// With few slots the time is that of reading the weights: each is read once, by one thread, straight into its registers,
// all of a unit's before anything is waited for. A lane takes four columns, a warp every 16th row; the warps' sums are then
// added in order, so that a sum does not depend on the other slots.
#pragma once

#include "common/dtype.cuh"
#include "tide_exit/plan.h"

namespace tide {

using namespace exits;

static_assert(kThreads == kSums && kTile == 32 * 4, "a thread adds up one sum of a unit, a lane takes four columns");

// A thread's part of a unit's sums: by slot, of columns `column` to `column` + 3.
struct Sums {
  float of[kSlots][4];
};

// Adds up what all warps have, in order: out(slot, column, sum), once for each. `partial` [kWarps][kSums] is shared memory.
template <class Out>
TIDE_DEVICE void add_up(Block& block, const Sums& sums, float* partial, Out out) {
  block.phase([&](int thread) {
    TIDE_UNROLL
    for (int slot = 0; slot < kSlots; ++slot)
      *reinterpret_cast<Four<float>*>(partial + thread / 32 * kSums + slot * kTile + thread % 32 * 4) = {
          {sums.of[slot][0], sums.of[slot][1], sums.of[slot][2], sums.of[slot][3]}};
  });
  block.phase([&](int thread) {
    float sum = 0.0f;
    TIDE_UNROLL
    for (int warp = 0; warp < kWarps; ++warp) sum += partial[warp * kSums + thread];
    out(thread / kTile, thread % kTile, sum);
  });
}

// The sums over `count` units, whose own lie one after the other, of the first `slots` slots; 0 for the others.
template <class Out>
TIDE_DEVICE void add_units(Block& block, const float* units, int count, int slots, float* partial, Out out) {
  Sums sums{};
  const int thread = static_cast<int>(threadIdx.x);
  for (int unit = thread / 32; unit < count; unit += kWarps) {
    TIDE_UNROLL
    for (int slot = 0; slot < kSlots; ++slot) {
      if (slot >= slots) continue;
      const auto* at = reinterpret_cast<const Four<float>*>(units + int64_t{unit} * kSums + slot * kTile) + thread % 32;
      const Four<float> more = *at;
      TIDE_UNROLL
      for (int j = 0; j < 4; ++j) sums.of[slot][j] += more.item[j];
    }
  }
  add_up(block, sums, partial, out);
}

// out(slot, column, sum) with the sum of x[row][slot] * w[row * stride + column] over all rows, for each of kTile columns: 0
// beyond `columns`. fill(begin) puts rows `begin` to `begin` + kRows - 1 into `x` [kRows][kSlots], 0 where there are none,
// and ends with a barrier, as it begins with one where it runs twice; it runs while the weights come. `x` and `partial` are
// shared memory.
template <class W, class Fill, class Out>
TIDE_DEVICE void multiply(Block& block, const W* w, int64_t stride, int columns, int rows, float* x, float* partial, Fill fill,
                          Out out) {
  const bool fours = allows_fours(w, stride, columns);
  const int warp = static_cast<int>(threadIdx.x) / 32, column = static_cast<int>(threadIdx.x) % 32 * 4;
  Sums sums{};
  const W* at = w + warp * stride + column;
  for (int begin = 0; begin < rows; begin += kRows) {
    Four<W> weights[kDeep];
    TIDE_UNROLL
    for (int i = 0; i < kDeep; ++i, at += kWarps * stride) {
      const int row = begin + i * kWarps + warp;
      if (fours && row < rows && column < columns) {
        weights[i] = *reinterpret_cast<const Four<W>*>(at);
      } else {
        TIDE_UNROLL
        for (int j = 0; j < 4; ++j) weights[i].item[j] = row < rows && column + j < columns ? at[j] : from_float<W>(0.0f);
      }
    }
    fill(begin);
    TIDE_UNROLL
    for (int i = 0; i < kDeep; ++i) {
      const Four<float> state = *reinterpret_cast<const Four<float>*>(x + (i * kWarps + warp) * kSlots);
      TIDE_UNROLL
      for (int slot = 0; slot < kSlots; ++slot)
        TIDE_UNROLL
        for (int j = 0; j < 4; ++j)
          sums.of[slot][j] = fmaf(state.item[slot], to_float(weights[i].item[j]), sums.of[slot][j]);
    }
  }
  add_up(block, sums, partial, out);
}

}  // namespace tide

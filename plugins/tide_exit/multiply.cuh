// Multiplies the states of a few slots by a matrix, as a block does it: what TideExit spends its time on.
//
// With few slots the time is that of reading the weights. Each weight is read once, by one thread, straight into its
// registers, kDeep rows at a time. A lane takes four columns, a warp every 16th row; the warps' sums are then added in
// order, so that a sum does not depend on the other slots.
#pragma once

#include "common/dtype.cuh"

namespace tide {

constexpr int kSlots = 4;  // of a team
constexpr int kWarps = kThreads / 32, kTile = 128;  // columns at a time
constexpr int kDeep = 8;  // rows that a thread has under way
constexpr int kPartialSums = kWarps * kSlots * kTile;  // floats

// Adds the product of every kWarps-th row, from `warp` on, with columns `column` to `column` + 3 to `sum`.
template <bool kFours, class W>
TIDE_DEVICE void multiply_rows(const float* x, int rows, const W* w, int64_t stride, int columns, int warp, int column,
                               float (&sum)[kSlots][4]) {
  const W* at = w + warp * stride + column;
  for (int first = warp; first < rows; first += kWarps * kDeep) {
    Four<W> weights[kDeep];
    TIDE_UNROLL
    for (int i = 0; i < kDeep; ++i) {
      if (first + i * kWarps >= rows) break;
      if (kFours) {
        weights[i] = *reinterpret_cast<const Four<W>*>(at);
      } else {
        TIDE_UNROLL
        for (int j = 0; j < 4; ++j) weights[i].item[j] = column + j < columns ? at[j] : from_float<W>(0.0f);
      }
      at += kWarps * stride;
    }
    TIDE_UNROLL
    for (int i = 0; i < kDeep; ++i) {
      const int row = first + i * kWarps;
      if (row >= rows) break;
      const Four<float> state = *reinterpret_cast<const Four<float>*>(x + row * kSlots);
      TIDE_UNROLL
      for (int slot = 0; slot < kSlots; ++slot)
        TIDE_UNROLL
        for (int j = 0; j < 4; ++j) sum[slot][j] = fmaf(state.item[slot], to_float(weights[i].item[j]), sum[slot][j]);
    }
  }
}

// Calls out(slot, column, sum) with the sum of x[row][slot] * w[row * stride + column] over all rows, for all columns.
// `x` [rows][kSlots] and `partial` [kPartialSums] are shared memory, 16-byte aligned.
template <class W, class Out>
TIDE_DEVICE void multiply(Block& block, const float* x, int rows, const W* w, int64_t stride, int columns, float* partial,
                          Out out) {
  const bool fours = allows_fours(w, stride, columns);
  for (int tile = 0; tile < columns; tile += kTile) {
    block.phase([&](int thread) {
      const int warp = thread / 32, lane = thread % 32;
      const int column = tile + lane * 4;
      float sum[kSlots][4] = {};
      if (column < columns && fours) multiply_rows<true>(x, rows, w, stride, columns, warp, column, sum);
      if (column < columns && !fours) multiply_rows<false>(x, rows, w, stride, columns, warp, column, sum);
      TIDE_UNROLL
      for (int slot = 0; slot < kSlots; ++slot)
        TIDE_UNROLL
        for (int j = 0; j < 4; ++j) partial[(warp * kSlots + slot) * kTile + lane * 4 + j] = sum[slot][j];
    });
    block.phase([&](int thread) {
      const int slot = thread / kTile;
      const int column = tile + thread % kTile;
      if (column >= columns) return;
      float sum = 0.0f;
      TIDE_UNROLL
      for (int warp = 0; warp < kWarps; ++warp) sum += partial[warp * kSlots * kTile + thread];
      out(slot, column, sum);
    });
  }
}
static_assert(kThreads == kSlots * kTile, "a thread adds up one sum of a tile");

}  // namespace tide

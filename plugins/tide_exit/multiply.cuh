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

// Reads kRows rows of weights, kWarps apart, and adds their products with columns `column` to `column` + 3 to `sum`.
template <int kRows, bool kFours, class W>
TIDE_DEVICE void multiply_some(const float* x, const W* at, int64_t step, int columns, int column,
                               float (&sum)[kSlots][4]) {
  Four<W> weights[kRows];
  TIDE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    if (kFours) {
      weights[i] = *reinterpret_cast<const Four<W>*>(at + i * step);
    } else {
      TIDE_UNROLL
      for (int j = 0; j < 4; ++j) weights[i].item[j] = column + j < columns ? at[i * step + j] : from_float<W>(0.0f);
    }
  }
  TIDE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const Four<float> state = *reinterpret_cast<const Four<float>*>(x + i * kWarps * kSlots);
    TIDE_UNROLL
    for (int slot = 0; slot < kSlots; ++slot)
      TIDE_UNROLL
      for (int j = 0; j < 4; ++j) sum[slot][j] = fmaf(state.item[slot], to_float(weights[i].item[j]), sum[slot][j]);
  }
}

// Adds the product of every kWarps-th row, from `warp` on, with columns `column` to `column` + 3 to `sum`, in order: kDeep
// rows at a time, and half as many where there are no more. A loop that may end between rows under way would keep their
// weights on the stack.
template <int kRows, bool kFours, class W>
TIDE_DEVICE void multiply_rows(const float* x, int rows, const W* w, int64_t stride, int columns, int row, int column,
                               float (&sum)[kSlots][4]) {
  for (; row + (kRows - 1) * kWarps < rows; row += kRows * kWarps)
    multiply_some<kRows, kFours>(x + row * kSlots, w + row * stride + column, kWarps * stride, columns, column, sum);
  if constexpr (kRows > 1) multiply_rows<kRows / 2, kFours>(x, rows, w, stride, columns, row, column, sum);
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
      if (column < columns && fours) multiply_rows<kDeep, true>(x, rows, w, stride, columns, warp, column, sum);
      if (column < columns && !fours) multiply_rows<kDeep, false>(x, rows, w, stride, columns, warp, column, sum);
      TIDE_UNROLL
      for (int slot = 0; slot < kSlots; ++slot)
        *reinterpret_cast<Four<float>*>(partial + (warp * kSlots + slot) * kTile + lane * 4) = {
            {sum[slot][0], sum[slot][1], sum[slot][2], sum[slot][3]}};
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

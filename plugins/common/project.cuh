// Multiplies rows by up to two weight matrices: most of the work of routers and lenses.
//
// With few rows the time is that of reading the weights: the depth is divided among blocks (one chunk each, so that one
// block reads each weight once) and `partial` gets one slice per chunk. With many rows a block sums over the whole
// depth and there is one slice. Readers of `partial` add the slices in ascending order (`slice_sum`).
#pragma once

#include "common/arithmetic.h"
#include "common/tiles.cuh"

namespace tide {

struct Weights {
  const void* data;  // [depth, columns], contiguous
  int64_t columns;
  bool packs;  // rows may be read in packs
};

struct Projection {
  // x [rows, depth]; elements of a row are adjacent, rows `x_stride` elements apart.
  const void* x;
  int32_t x_type;
  int64_t rows, depth, x_stride;
  // The norm before the product, if moments != null: moments [rows]; scale and shift [depth], of the weights' type.
  const Moments* moments;
  const void* scale;
  const void* shift;
  float scale_offset;
  // Weights [depth, columns] of both matrices; the second may have 0 columns.
  int32_t weights_type;
  Weights weights[2];
  float* partial;  // [slices, rows, columns of both]
  // Set by `project`.
  bool x_packs;
  bool split;
};

// Up to this many rows the depth is divided among blocks.
constexpr int64_t kSplitRows = 512;

inline int64_t slices(int64_t rows, int64_t depth) { return rows <= kSplitRows ? blocks_for(depth, kChunk) : 1; }

// Floats that `partial` must hold for this many rows or fewer.
inline int64_t partial_size(int64_t rows, int64_t depth, int64_t columns) {
  const int64_t split = (rows < kSplitRows ? rows : kSplitRows) * blocks_for(depth, kChunk);
  return (split > rows ? split : rows) * columns;
}

// The sum of one element of the product over its slices, which are `stride` floats apart.
TIDE_DEVICE float slice_sum(const float* element, int64_t count, int64_t stride) {
  float sum = 0.0f;
  TIDE_UNROLL_BY_8
  for (int64_t i = 0; i < count; ++i) sum += element[i * stride];
  return sum;
}

// Starts the computation of `partial` on `stream`. Types other than (T, T) and (T, float32) are refused.
cudaError_t project(Projection projection, cudaStream_t stream);

// Moments of each row of x for the norm `kind`, on `stream`.
cudaError_t row_moments(const void* x, int32_t type, int64_t rows, int64_t width, int64_t stride, int32_t kind,
                        float epsilon, Moments* moments, cudaStream_t stream);

}  // namespace tide

// RMSNorm and LayerNorm of a row by one block: its moments, and the normalization of one element.
#pragma once

#include "common/arithmetic.h"
#include "common/dtype.cuh"

namespace tide {

// Whether the norm's `kind` is one of TideNorm and it has a scale.
inline bool usable_norm(const TideNormArgs& norm) {
  return norm.kind == TIDE_NORM_NONE ||
         ((norm.kind == TIDE_NORM_RMS || norm.kind == TIDE_NORM_LAYER) && norm.scale != nullptr);
}

// Moments of a row of `width` elements. `sum(thread, f)` sums f(element) over a thread's share of the row. The mean
// comes first and then the squares of the deviations, so that nothing cancels. `sums` is shared memory.
template <int kThreads, class B, class Sum>
TIDE_DEVICE Moments row_moments(B& block, float* sums, int32_t kind, float width, float epsilon, Sum sum) {
  const auto add = [](float a, float b) { return a + b; };
  float mean = 0.0f;
  if (kind == TIDE_NORM_LAYER) {
    block.phase([&](int thread) { sums[thread] = sum(thread, [](float x) { return x; }); });
    fold<kThreads>(block, sums, add);
    mean = sums[0] / width;
    block.phase([](int) {});  // all have read slot 0 before it is written again
  }
  block.phase([&](int thread) { sums[thread] = sum(thread, [mean](float x) { return (x - mean) * (x - mean); }); });
  fold<kThreads>(block, sums, add);
  return {mean, inverse_deviation(sums[0], width, epsilon)};
}

// The value `x` of element `index` of a row after the norm; `scale` and `shift` (or null) are of type W.
template <class W>
TIDE_DEVICE float normalized(float x, Moments moments, const void* scale, float scale_offset, const void* shift,
                         int64_t index) {
  const float value =
      (x - moments.mean) * moments.scale * (to_float(static_cast<const W*>(scale)[index]) + scale_offset);
  return shift == nullptr ? value : value + to_float(static_cast<const W*>(shift)[index]);
}

}  // namespace tide

// The scalar arithmetic of the kernels: everything is float32, and host and device compile the same lines.
#pragma once

#include <cmath>

#include "common/block.cuh"

namespace tide {

TIDE_BOTH float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

TIDE_BOTH float silu(float x) { return x / (1.0f + expf(-x)); }

TIDE_BOTH float negative_infinity() { return -INFINITY; }

// The two largest of some logits and sum(exp(logit - first)), computed in one pass. weight == 0: no logit yet. A NaN
// among the logits makes `weight` NaN, and so both log-probabilities, as in log-softmax.
struct TopTwo {
  float first;
  float second;
  float weight;
};

TIDE_BOTH TopTwo empty_top_two() { return {negative_infinity(), negative_infinity(), 0.0f}; }

TIDE_BOTH TopTwo merged(TopTwo a, TopTwo b) {
  if (a.weight == 0.0f) return b;
  if (b.weight == 0.0f) return a;
  if (b.first > a.first) {
    TopTwo swap = a;
    a = b;
    b = swap;
  }
  a.weight += b.weight * expf(b.first - a.first);
  a.second = fmaxf(a.second, b.first);
  return a;
}

TIDE_BOTH TopTwo with(TopTwo seen, float logit) { return merged(seen, {logit, negative_infinity(), 1.0f}); }

TIDE_BOTH float first_log_probability(TopTwo seen) { return -logf(seen.weight); }

TIDE_BOTH float second_log_probability(TopTwo seen) { return seen.second - seen.first - logf(seen.weight); }

}  // namespace tide

// The scalar arithmetic of the kernels: everything is float32, and host and device compile the same lines.
#pragma once

#include <cmath>

#include "common/team.cuh"

namespace tide {

TIDE_BOTH float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

TIDE_BOTH float silu(float x) { return x / (1.0f + expf(-x)); }

TIDE_BOTH float negative_infinity() { return -INFINITY; }

// Of some numbers: how many, their mean and the sum of the squares of their deviations from it, so that nothing cancels.
struct Moments {
  float count;
  float mean;
  float squares;
};

// The moments of all numbers of some groups, from each group's count, mean and squares; they are `stride` floats apart.
TIDE_BOTH Moments merged(const float* groups, int count, int stride) {
  float total = 0.0f, sum = 0.0f, squares = 0.0f;
  for (int i = 0; i < count; ++i) {
    const float* group = groups + i * stride;
    total += group[0];
    sum += group[0] * group[1];
  }
  const float mean = sum / total;
  for (int i = 0; i < count; ++i) {
    const float* group = groups + i * stride;
    squares += group[2] + group[0] * (group[1] - mean) * (group[1] - mean);
  }
  return {total, mean, squares};
}

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

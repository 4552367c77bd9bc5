// Chooses the next token from logits: greedily, or sampled after temperature, top-k and top-p, in that order. The rules
// are those of tide_export/runtime/decoding/sampling.py; the random numbers differ.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "tide/runtime.h"

namespace tide {

// Tokens that can be drawn, and their probabilities or weights.
struct Choices {
  std::vector<std::int64_t> ids;
  std::vector<double> weights;
};

class Sampler {
 public:
  // Uses the configuration's temperature, top_k and top_p; without a seed it takes a random one. Throws
  // GenerationError: temperature below 0, top_k below 0, top_p outside (0, 1], seed below 0.
  Sampler(GenerationConfig const& config, std::optional<std::int64_t> seed);

  // Whether the most likely token is taken and nothing is drawn.
  bool greedy() const { return temperature_ == 0; }

  // The next token from logits [vocabulary]. Of equal logits, greedy and top-k prefer the lowest id. Throws
  // GenerationError: the logits are not finite.
  std::int64_t operator()(float const* logits, std::size_t vocabulary);

  // The tokens that can be drawn, with probabilities that sum to 1.
  Choices distribution(float const* logits, std::size_t vocabulary) const;

  // One of the ids, with probability proportional to its weight.
  std::int64_t draw(Choices const& choices);

  // A random number in [0, 1).
  double uniform();

 private:
  double temperature_;
  std::size_t top_k_;
  double top_p_;
  std::mt19937_64 random_;
};

}  // namespace tide

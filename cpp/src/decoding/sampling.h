// Chooses the next token from logits. First `LogitsProcessing` changes them, where an option asks for it; then the most
// likely token is taken, or one is drawn after temperature, min-p, top-k and top-p. The rules are those of
// tide_export/runtime/decoding/sampling.py; the random numbers differ.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "decoding/processing.h"
#include "tide/runtime.h"
#include "tide/state.h"

namespace tide {

// Tokens that can be drawn, and their probabilities or weights.
struct Choices {
  std::vector<std::int64_t> ids;
  std::vector<double> weights;
};

// A chosen token.
struct Choice {
  std::int64_t id;
  std::optional<TokenLogprobs> logprobs;  // where asked for
};

class Sampler {
 public:
  // Uses the configuration's sampling options; without a seed it takes a random one. Throws GenerationError: one is out
  // of range.
  Sampler(GenerationConfig const& config, std::optional<std::int64_t> seed);

  // Whether the most likely token is taken and nothing is drawn.
  bool greedy() const { return temperature_ == 0; }

  // Reads the prompt of a sequence that has no tokens yet.
  void begin(std::vector<std::int64_t> const& prompt);

  // How many of the largest logits it chooses from; 0: it needs all of them.
  std::size_t candidates() const;

  // The next token from a row of a step's logits, or of its candidates; it is then part of the sequence. Of equal
  // logits, greedy and top-k prefer the lowest id. Throws GenerationError: the logits are not finite, or no token is
  // left.
  Choice operator()(StepResult const& result, std::size_t row);

  // The most likely token of the last row, of an early exit, after the same processing. It is part of the sequence for
  // further drafts, until the next token is chosen.
  std::int64_t draft(StepResult const& result);

  // The tokens that can be drawn, with probabilities that sum to 1.
  Choices distribution(float const* logits, std::size_t vocabulary) const;

  // One of the ids, with probability proportional to its weight.
  std::int64_t draw(Choices const& choices);

  // A random number in [0, 1).
  double uniform();

 private:
  // The logits to choose from.
  float const* processed(float const* logits, std::size_t vocabulary);

  // The index of the token chosen from `logits`.
  std::int64_t choose(float const* logits, std::size_t vocabulary);

  double temperature_;
  std::size_t top_k_;
  double top_p_;
  double min_p_;
  std::optional<std::size_t> logprobs_;           // the most likely tokens to return
  std::unique_ptr<LogitsProcessing> processing_;  // none: nothing changes logits
  std::size_t length_ = 0;                        // tokens of the sequence that are not drafts
  std::mt19937_64 random_;
};

}  // namespace tide

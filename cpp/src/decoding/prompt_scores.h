// Computes the log-probabilities of a prompt's tokens.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "decoding/decoder.h"
#include "tide/runtime.h"

namespace tide {

// Runs all tokens of a prompt but the last, before the decoder goes on with that one, through every layer and in pieces: the
// logits of a long prompt, one row a token, would not fit memory.
class PromptScores {
 public:
  // most: the most likely tokens to return of each.
  PromptScores(Manifest const& manifest, std::vector<std::int64_t> const& prompt, std::size_t most);

  // Tokens that one step may run, of all sequences together.
  static std::int64_t rows(Manifest const& manifest);

  bool done() const { return run_ + 1 >= static_cast<std::int64_t>(prompt_.size()); }

  // The next step, over at most `limit` tokens and `rows`. It is not `done`.
  StepRequest const& request(std::int64_t limit);

  // Takes its result. Throws GenerationError: logits are not finite. Nothing has changed then.
  void take(StepResult const& result);

  std::vector<PromptToken> take_tokens() { return std::move(tokens_); }  // once it is done

 private:
  std::vector<std::int64_t> const prompt_;
  std::size_t const most_;
  std::int64_t const rows_;
  std::int64_t run_ = 0;  // tokens that steps have run over
  StepRequest request_;
  std::vector<PromptToken> tokens_;
};

}  // namespace tide

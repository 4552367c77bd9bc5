// Changes the logits of one sequence before a token is chosen, in this order: logits_processor; the repetition penalty, over
// prompt and generated tokens, as in transformers; the frequency and then the presence penalty, over generated tokens, as in
// vLLM and OpenAI's API; logit_bias. All arithmetic is in float32, rounded after each step.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tide/runtime.h"

namespace tide {

class LogitsProcessing {
 public:
  // Uses the configuration's logits_processor, penalties and logit_bias. Throws GenerationError: one is out of range.
  explicit LogitsProcessing(GenerationConfig const& config);

  // Whether any of these options changes logits.
  static bool needed(GenerationConfig const& config);

  // Reads the prompt of a sequence that has no tokens yet. It may be called again, as where it threw.
  void begin(std::vector<std::int64_t> const& prompt);

  // Adds a token to the sequence. Where it throws, nothing has changed.
  void accept(std::int64_t token);

  // Removes all tokens but the first `length`.
  void rewind(std::size_t length);

  // Whether a constraint lets a token follow.
  bool allows(std::int64_t token) const;

  // Tokens of the prompt and those accepted since.
  std::size_t length() const { return ids_.size(); }

  // What the next token is chosen from, given the model's logits [vocabulary], which stay as they are; valid until the
  // next call. Throws GenerationError: the hook threw.
  float const* operator()(float const* logits, std::size_t vocabulary);

 private:
  struct Count {
    std::int64_t all = 0, generated = 0;
  };

  LogitsProcessor const processor_;
  AllowsToken const allows_token_;
  float const repetition_, presence_, frequency_;
  std::vector<std::pair<std::size_t, float>> bias_;
  bool const counts_tokens_;
  std::vector<std::int64_t> ids_;
  std::unordered_map<std::int64_t, Count> counts_;  // of the tokens that occur
  std::vector<float> logits_;
};

}  // namespace tide

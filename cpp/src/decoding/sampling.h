// Chooses the next token from logits. `LogitsProcessing` changes them first. Then the most likely token is taken, or one is
// drawn from those that the options keep (`Sampler::draw`).
//
// A draw is argmax(logit / T + Gumbel noise) over the tokens that are kept (`GumbelNoise`): it depends on the seed, the
// position and the logits, not on earlier draws.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "decoding/processing.h"
#include "tide/runtime.h"
#include "tide/state.h"

namespace tide {

class LogitsRow;

// The log-probabilities of a token and of the k most likely. Throws GenerationError: the logits are not finite.
TokenLogprobs logprobs_of(float const* logits, std::size_t vocabulary, std::int64_t token, std::size_t k);

// A chosen token.
struct Choice {
  std::int64_t id;
  std::optional<TokenLogprobs> logprobs;  // where asked for
};

// A draft, and the probability that its logits give it.
struct LikelyDraft {
  std::int64_t id;
  double confidence;
};

class Sampler {
 public:
  // Uses the configuration's sampling options; without a seed it takes a random one. Throws GenerationError: one is out
  // of range.
  Sampler(GenerationConfig const& config, std::optional<std::int64_t> seed);

  // Whether the most likely token is taken and nothing is drawn.
  bool greedy() const { return config_.temperature == 0; }

  // Reads the prompt of a sequence that has no tokens yet.
  void begin(std::vector<std::int64_t> const& prompt);

  // Tokens of the sequence that are not drafts, and back to fewer of them.
  std::size_t length() const { return length_; }
  void rewind(std::size_t length) { length_ = length; }

  // Tokens that drafts are added to, which `undo` goes back to.
  std::size_t with_drafts() const { return processing_ ? processing_->length() : 0; }
  void undo(std::size_t with_drafts) {
    if (processing_) processing_->rewind(with_drafts);
  }

  // How many of the largest logits it chooses from; 0: it needs all of them.
  std::size_t candidates() const;

  // The next token from a row of a step's logits, or of its candidates; it is then part of the sequence. Of equal
  // logits, greedy and top-k prefer the lowest id. Throws GenerationError: the logits are not finite. ConstraintError: no
  // token is left. The sampler is then as before.
  Choice operator()(StepResult const& result, std::size_t row);

  // A draft from the last row, of an early exit: drawn after the same processing and with the same noise as the token `ahead`
  // places after the next one will be, so that it is that token nearly as often as both distributions overlap (coupled by
  // Gumbel noise: Daliri et al. 2024, arXiv 2408.07978). It is part of the sequence for further drafts, until the next token
  // is chosen. Throws as above.
  std::int64_t draft(StepResult const& result, std::size_t ahead);

  // A drafter's draft, from its logits of some tokens, drawn alike. None: a constraint leaves none of these tokens.
  //
  // tokens: ascending, whose `logits` these are. vocabulary: of the model.
  std::optional<LikelyDraft> draft(float const* logits, std::vector<std::int64_t> const& tokens, std::size_t vocabulary,
                                   std::size_t ahead);

  // Adds an n-gram draft to the sequence, until the next token is chosen, unless a constraint does not let it follow;
  // returns whether it does.
  bool take_draft(std::int64_t token);

 private:
  // The logits to choose from.
  float const* processed(float const* logits, std::size_t vocabulary);

  // The index of the token at a position of the sequence that is chosen from logits, of tokens 0, 1, ... or of `tokens`.
  std::size_t choose(LogitsRow const& row, float const* logits, std::size_t count, std::int64_t const* tokens,
                     std::size_t position) const;
  std::size_t draw(LogitsRow const& row, float const* logits, std::size_t count, std::int64_t const* tokens,
                   std::size_t position) const;

  std::size_t draw_likely(LogitsRow const& row, float const* logits, std::int64_t const* tokens,
                          std::size_t position) const;

  GenerationConfig config_;
  std::unique_ptr<LogitsProcessing> processing_;  // none: nothing changes logits
  std::vector<float> all_;                        // a drafter's logits among those of all tokens
  std::size_t length_ = 0;                        // tokens of the sequence that are not drafts
  std::uint64_t seed_ = 0;
};

}  // namespace tide

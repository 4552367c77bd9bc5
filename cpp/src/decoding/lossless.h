// Lossless mode: tokens that exit early are drafts, and one run of the deep segments over all pending tokens verifies
// them. The rule is that of tide_export/runtime/decoding/lossless.py, which cites the papers.
#pragma once

#include <optional>
#include <set>
#include <vector>

#include "decoding/decoder.h"
#include "decoding/prompt_lookup.h"
#include "decoding/sampling.h"

namespace tide {

// How far a decoder may draft; the defaults are for bundles that do not say.
struct DraftLimits {
  std::int64_t max_drafts = 6;     // early exits that one verification may cover; 0: none
  std::int64_t prompt_lookup = 8;  // tokens of one prompt-lookup draft, at most; 0: none
  std::int64_t min_match = 2;      // length of the shortest n-gram that prompt lookup matches
};

class LosslessDecoder final : public Decoder {
 public:
  LosslessDecoder(Manifest const& manifest, Sampler sampler, DraftLimits const& limits, std::set<std::int64_t> stops);

  bool verifies() const override { return true; }
  void begin(std::vector<std::int64_t> const& ids, std::int64_t max_tokens) override;
  std::vector<Token> take(StepResult const& result) override;

 private:
  // A token that awaits verification, and the distribution it was drawn from (empty if greedy).
  struct Draft {
    Token token;
    Choices choices;
  };

  void request_step(std::vector<std::int64_t> const& ids);
  std::vector<std::int64_t> lookup(std::int64_t max_tokens, std::int64_t length) const;
  Draft draw(StepResult const& result, std::int64_t passes);
  std::vector<Token> verify(StepResult const& result, std::int64_t passes);
  std::optional<std::int64_t> replacement(Draft const& draft, float const* logits, std::size_t vocabulary);

  Sampler sampler_;
  std::vector<std::int64_t> const depths_;
  std::int64_t const max_drafts_;
  PromptLookup lookup_;
  std::set<std::int64_t> const stops_;
  std::optional<std::int64_t> const context_;
  std::int64_t max_tokens_ = 1;             // of the block
  std::vector<Draft> drafts_;               // of the block, so far
  std::vector<std::int64_t> lookup_draft_;  // prompt-lookup tokens after them in the requested step
};

}  // namespace tide

#include "decoding/lossless.h"

#include <algorithm>
#include <optional>

#include "decoding/prompt_lookup.h"

namespace tide {
namespace {

// The probabilities [vocabulary] of a distribution.
std::vector<double> dense(Choices const& choices, std::size_t vocabulary) {
  std::vector<double> probabilities(vocabulary, 0.0);
  for (std::size_t i = 0; i < choices.ids.size(); ++i) {
    probabilities[static_cast<std::size_t>(choices.ids[i])] = choices.weights[i];
  }
  return probabilities;
}

// A token that awaits verification, and the distribution it was drawn from (empty if greedy).
struct Draft {
  Token token;
  Choices choices;
};

class LosslessDecoder final : public Decoder {
 public:
  LosslessDecoder(Manifest const& manifest, Sampler sampler, DraftLimits const& limits, std::set<std::int64_t> stops)
      : sampler_(std::move(sampler)),
        depths_(manifest.depths()),
        max_drafts_(limits.max_drafts),
        lookup_(limits.prompt_lookup, limits.min_match),
        stops_(std::move(stops)),
        context_(manifest.model.context_length) {}

  bool verifies() const override { return true; }

  void begin(std::vector<std::int64_t> const& ids, std::int64_t max_tokens) override {
    if (length_ == 0) lookup_.extend(ids);
    max_tokens_ = length_ == 0 ? 1 : max_tokens;  // a prompt needs every layer: no draft
    drafts_.clear();
    request_step(ids);
  }

  std::vector<Token> take(StepResult const& result) override {
    length_ += static_cast<std::int64_t>(request_.ids.size());
    std::int64_t const passes = depths_[static_cast<std::size_t>(result.segments_run - 1)];
    if (static_cast<std::size_t>(result.segments_run) == depths_.size()) return verify(result, passes);
    drafts_.push_back(draw(result, passes));
    request_step({drafts_.back().token.id});
    return {};
  }

 private:
  // Requests the step over `ids`, which drafts one more token or verifies all drafts.
  void request_step(std::vector<std::int64_t> const& ids) {
    std::int64_t const length = length_ + static_cast<std::int64_t>(ids.size());
    auto const drafts = static_cast<std::int64_t>(drafts_.size());
    bool const ends = drafts > 0 && stops_.count(drafts_.back().token.id) == 1;
    bool const context_full = context_ && length == *context_;
    lookup_draft_ = ends ? std::vector<std::int64_t>{} : lookup(max_tokens_ - 1 - drafts, length);
    request_.ids = ids;
    request_.ids.insert(request_.ids.end(), lookup_draft_.begin(), lookup_draft_.end());
    request_.logits_to_keep = drafts + static_cast<std::int64_t>(lookup_draft_.size()) + 1;
    request_.full =
        !lookup_draft_.empty() || drafts >= std::min(max_drafts_, max_tokens_ - 1) || context_full || ends;
  }

  // The prompt-lookup draft after a sequence of `length` tokens that ends in the drafts; ends with a stop token.
  std::vector<std::int64_t> lookup(std::int64_t max_tokens, std::int64_t length) const {
    if (context_) max_tokens = std::min(max_tokens, *context_ - length);
    std::vector<std::int64_t> ids;
    for (Draft const& draft : drafts_) ids.push_back(draft.token.id);
    std::vector<std::int64_t> draft = lookup_.draft(ids, max_tokens);
    auto const stop =
        std::find_if(draft.begin(), draft.end(), [&](std::int64_t token) { return stops_.count(token) == 1; });
    if (stop != draft.end()) draft.erase(stop + 1, draft.end());
    return draft;
  }

  Draft draw(StepResult const& result, std::int64_t passes) {
    if (sampler_.greedy()) return {{sampler_(result.last(), result.vocabulary), result.exit_layer, passes}, {}};
    Choices choices = sampler_.distribution(result.last(), result.vocabulary);
    return {{sampler_.draw(choices), result.exit_layer, passes}, std::move(choices)};
  }

  // The accepted drafts, and the full model's token after them, from its logits of every draft.
  std::vector<Token> verify(StepResult const& result, std::int64_t passes) {
    auto const exits = static_cast<std::int64_t>(drafts_.size());
    // A prompt-lookup draft was not sampled: its distribution has this token alone.
    for (std::int64_t const id : lookup_draft_) {
      drafts_.push_back({{id, 0, 0}, sampler_.greedy() ? Choices{} : Choices{{id}, {1.0}}});
    }
    std::vector<Token> tokens;
    std::optional<std::int64_t> last;
    while (!last && tokens.size() < drafts_.size()) {
      Draft const& draft = drafts_[tokens.size()];
      last = replacement(draft, result.row(tokens.size()), result.vocabulary);
      if (!last) tokens.push_back(draft.token);
    }
    if (!last) last = sampler_(result.last(), result.vocabulary);
    auto const drafts = static_cast<std::int64_t>(drafts_.size());
    auto const num_accepted = static_cast<std::int64_t>(tokens.size());
    std::int64_t const lookup_drafts = drafts - exits;
    if (lookup_drafts > 0 && num_accepted >= exits) lookup_.update(lookup_drafts, num_accepted - exits);
    drafted += drafts;
    accepted += num_accepted;
    lookup_drafted += lookup_drafts;
    lookup_accepted += std::max<std::int64_t>(num_accepted - exits, 0);
    undone += drafts - num_accepted;
    length_ -= drafts - num_accepted;
    std::int64_t rejected_passes = 0;
    for (std::size_t i = tokens.size(); i < drafts_.size(); ++i) rejected_passes += drafts_[i].token.layers_run;
    tokens.push_back({*last, result.exit_layer, passes + rejected_passes});
    std::vector<std::int64_t> ids;
    for (Token const& token : tokens) ids.push_back(token.id);
    lookup_.extend(ids);
    return tokens;
  }

  // The full model's token if the draft is rejected, none if it is accepted. Speculative rejection: with p the full
  // model's probabilities and q those that the draft was drawn from, it is accepted with probability min(1, p / q);
  // else the token is drawn from max(p - q, 0), normalised.
  std::optional<std::int64_t> replacement(Draft const& draft, float const* logits, std::size_t vocabulary) {
    if (sampler_.greedy()) {
      std::int64_t const token = sampler_(logits, vocabulary);
      return token == draft.token.id ? std::nullopt : std::optional(token);
    }
    std::vector<double> const p = dense(sampler_.distribution(logits, vocabulary), vocabulary);
    std::vector<double> const q = dense(draft.choices, vocabulary);
    auto const id = static_cast<std::size_t>(draft.token.id);
    if (sampler_.uniform() * q[id] < p[id]) return std::nullopt;
    Choices rest;
    for (std::size_t i = 0; i < vocabulary; ++i) {
      if (p[i] <= q[i]) continue;
      rest.ids.push_back(static_cast<std::int64_t>(i));
      rest.weights.push_back(p[i] - q[i]);
    }
    return sampler_.draw(rest);
  }

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

}  // namespace

std::unique_ptr<Decoder> make_lossless_decoder(Manifest const& manifest, Sampler sampler, DraftLimits const& limits,
                                               std::set<std::int64_t> const& stops) {
  return std::make_unique<LosslessDecoder>(manifest, std::move(sampler), limits, stops);
}

}  // namespace tide

#include "decoding/lossless.h"

#include <algorithm>
#include <optional>

#include "decoding/acceptance.h"
#include "decoding/prompt_lookup.h"

namespace tide {
namespace {

constexpr double kTokenValue = 0.75;     // steps of full depth that an accepted draft saves
constexpr double kMinNgramShare = 0.3;  // estimated acceptance below which an early exit is tried first

// A token that awaits verification.
struct Draft {
  Token token;
  std::size_t source;  // see `Acceptance`
};

// What one more draft costs if there are 0, 1, 2 or 3, 4 to 7, 8 or more, from the costs of 1, 2, 4, 8, 16.
std::vector<double> slopes(std::vector<double> const& costs) {
  std::vector<double> slopes{costs[0]};
  for (std::size_t i = 1; i < costs.size(); ++i) {
    slopes.push_back((costs[i] - costs[i - 1]) / static_cast<double>(1 << (i - 1)));
  }
  return slopes;
}

class LosslessDecoder final : public Decoder {
 public:
  LosslessDecoder(Manifest const& manifest, Sampler sampler, DraftLimits const& limits, std::set<std::int64_t> stops)
      : sampler_(std::move(sampler)),
        depths_(manifest.depths()),
        max_drafts_(limits.max_drafts),
        max_ngram_(limits.prompt_lookup),
        slopes_(slopes(limits.verify_costs)),
        stops_(std::move(stops)),
        context_(manifest.model.context_length) {}

  bool verifies() const override { return true; }

  void begin(std::vector<std::int64_t> const& ids, std::int64_t max_tokens) override {
    if (length_ == 0) extend(ids);
    max_tokens_ = length_ == 0 ? 1 : max_tokens;  // a prompt needs every layer: no draft
    limit_ = acceptance_.exits_pay() ? std::min(max_drafts_, max_tokens_ - 1) : 0;
    drafts_.clear();
    request_step(ids);
  }

  std::vector<Token> take(StepResult const& result) override {
    length_ += static_cast<std::int64_t>(request_.ids.size());
    std::int64_t const passes = depths_[static_cast<std::size_t>(result.segments_run - 1)];
    if (static_cast<std::size_t>(result.segments_run) == depths_.size()) return verify(result, passes);
    drafts_.push_back({{top_(result.last(), result.vocabulary), result.exit_layer, passes}, kExits});
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
    bool const may_exit = drafts < limit_ && !ends && !context_full;
    ngram_.clear();
    if (!ends) draft_ngram(max_tokens_ - 1 - drafts, length, may_exit);
    request_.ids = ids;
    for (Draft const& draft : ngram_) request_.ids.push_back(draft.token.id);
    request_.logits_to_keep = drafts + static_cast<std::int64_t>(ngram_.size()) + 1;
    request_.full = !ngram_.empty() || !may_exit;
  }

  // Adds tokens to the text that is searched.
  void extend(std::vector<std::int64_t> const& ids) {
    if (max_ngram_ > 0) lookup_.extend(ids);
  }

  // Drafts by prompt lookup after a sequence of `length` tokens that ends in the drafts: up to a stop token, and as
  // long as the next token is expected to save more than its verification costs.
  void draft_ngram(std::int64_t max_tokens, std::int64_t length, bool may_exit) {
    if (context_) max_tokens = std::min(max_tokens, *context_ - length);
    max_tokens = std::min(max_tokens, max_ngram_);
    std::vector<std::int64_t> tokens;
    for (Draft const& draft : drafts_) tokens.push_back(draft.token.id);
    double share = 1;
    while (static_cast<std::int64_t>(ngram_.size()) < max_tokens) {
      if (!ngram_.empty() && stops_.count(tokens.back()) == 1) return;
      auto const match = lookup_.next(tokens);
      if (!match) return;
      share *= acceptance_.of(match->source);
      std::size_t slope = 0;  // the bits of how many drafts there are
      while (slope + 1 < slopes_.size() && tokens.size() >> slope > 0) ++slope;
      if (share * kTokenValue < slopes_[slope] || (may_exit && ngram_.empty() && share < kMinNgramShare)) return;
      ngram_.push_back({{match->token, 0, 0}, match->source});
      tokens.push_back(match->token);
    }
  }

  // The accepted drafts, and the full model's token after them, from its logits of every draft.
  std::vector<Token> verify(StepResult const& result, std::int64_t passes) {
    std::size_t const exits = drafts_.size();
    drafts_.insert(drafts_.end(), ngram_.begin(), ngram_.end());
    std::vector<Token> tokens;
    std::int64_t last = sampler_(result.row(0), result.vocabulary);
    while (tokens.size() < drafts_.size() && drafts_[tokens.size()].token.id == last) {
      tokens.push_back(drafts_[tokens.size()].token);
      last = sampler_(result.row(tokens.size()), result.vocabulary);
    }
    std::vector<std::size_t> sources;
    for (Draft const& draft : drafts_) sources.push_back(draft.source);
    acceptance_.record(sources, tokens.size());
    auto const drafts = static_cast<std::int64_t>(drafts_.size());
    auto const num_accepted = static_cast<std::int64_t>(tokens.size());
    drafted += drafts;
    accepted += num_accepted;
    lookup_drafted += static_cast<std::int64_t>(ngram_.size());
    lookup_accepted += std::max<std::int64_t>(num_accepted - static_cast<std::int64_t>(exits), 0);
    undone += drafts - num_accepted;
    length_ -= drafts - num_accepted;
    std::int64_t rejected_passes = 0;
    for (std::size_t i = tokens.size(); i < drafts_.size(); ++i) rejected_passes += drafts_[i].token.layers_run;
    tokens.push_back({last, result.exit_layer, passes + rejected_passes});
    std::vector<std::int64_t> ids;
    for (Token const& token : tokens) ids.push_back(token.id);
    extend(ids);
    return tokens;
  }

  Sampler sampler_;
  Sampler top_{GenerationConfig{}, std::nullopt};  // gives the most likely token of an early exit's logits
  std::vector<std::int64_t> const depths_;
  std::int64_t const max_drafts_;
  std::int64_t const max_ngram_;
  std::vector<double> const slopes_;
  PromptLookup lookup_;
  Acceptance acceptance_;
  std::set<std::int64_t> const stops_;
  std::optional<std::int64_t> const context_;
  std::int64_t max_tokens_ = 1;             // of the block
  std::int64_t limit_ = 0;                  // early exits of the block, at most
  std::vector<Draft> drafts_;               // of the block, so far
  std::vector<Draft> ngram_;                // by prompt lookup after them in the requested step
};

}  // namespace

std::unique_ptr<Decoder> make_lossless_decoder(Manifest const& manifest, Sampler sampler, DraftLimits const& limits,
                                               std::set<std::int64_t> const& stops) {
  return std::make_unique<LosslessDecoder>(manifest, std::move(sampler), limits, stops);
}

}  // namespace tide

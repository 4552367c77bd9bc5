#include "decoding/lossless.h"

#include <algorithm>
#include <optional>

#include "decoding/acceptance.h"
#include "decoding/prompt_lookup.h"
#include "room.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr double kHeadCost = 0.1;     // of a step of full depth
constexpr double kTokenValue = 0.75;  // steps of full depth that an accepted draft saves

// A token that awaits verification.
struct Draft {
  Token token;
  std::optional<std::size_t> source;  // see `Acceptance`; none: an early exit
};

// What verifying drafts costs, from the costs of 1, 2, 4, 8 and 16.
double verify_cost(std::vector<double> const& costs, std::size_t drafts) {
  if (drafts == 0) return 0;
  std::size_t k = 0;
  while (k + 2 < costs.size() && drafts >> (k + 1) > 0) ++k;
  double const known = static_cast<double>(std::size_t{1} << k);
  return costs[k] + (static_cast<double>(drafts) - known) * (costs[k + 1] - costs[k]) / known;
}

class LosslessDecoder final : public Decoder {
 public:
  LosslessDecoder(std::vector<std::int64_t> depths, std::optional<std::int64_t> context, Sampler sampler,
                  DraftLimits const& limits, std::set<std::int64_t> stops)
      : sampler_(std::move(sampler)),
        depths_(std::move(depths)),
        max_drafts_(limits.max_drafts),
        max_ngram_(limits.prompt_lookup),
        draft_costs_(limits.draft_costs),
        verify_costs_(limits.verify_costs),
        stops_(std::move(stops)),
        context_(context) {}

  bool verifies() const override { return true; }

  void begin(std::vector<std::int64_t> const& ids, std::int64_t max_tokens) override {
    if (length_ == 0) {
      sampler_.begin(ids);
      extend(ids);
    }
    max_tokens_ = length_ == 0 ? 1 : max_tokens;  // a prompt needs every layer: no draft
    drafts_.clear();
    cost_ = 0;
    sampler_.undo(sampler_.length());
    request_step(ids);
  }

  std::vector<Token> take(StepResult const& result) override {
    std::int64_t const passes = depths_[static_cast<std::size_t>(result.segments_run - 1)];
    auto const ran = static_cast<std::int64_t>(request_.ids.size());
    if (static_cast<std::size_t>(result.segments_run) == depths_.size()) {
      std::size_t const before = sampler_.length();
      try {
        return verify(result, passes, length_ + ran);
      } catch (...) {
        sampler_.rewind(before);
        throw;
      }
    }
    double const cost = draft_costs_[static_cast<std::size_t>(result.segments_run - 1)];
    std::size_t const before = sampler_.with_drafts();
    make_room(drafts_, 1);
    std::int64_t const drafted_id = sampler_.draft(result);
    drafts_.push_back({{drafted_id, result.exit_layer, passes}, std::nullopt});
    length_ += ran;
    cost_ += cost;
    try {
      request_step({drafted_id});
    } catch (...) {
      drafts_.pop_back();
      length_ -= ran;
      cost_ -= cost;
      sampler_.undo(before);
      throw;
    }
    return {};
  }

 private:
  // Requests the step over `ids`, which drafts one more token or verifies all drafts. Where it throws, only the sampler may
  // have changed.
  void request_step(std::vector<std::int64_t> const& ids) {
    std::int64_t const length = length_ + static_cast<std::int64_t>(ids.size());
    auto const drafts = static_cast<std::int64_t>(drafts_.size());
    bool const ends = drafts > 0 && stops_.count(drafts_.back().token.id) == 1;
    bool const context_full = context_ && length == *context_;
    std::int64_t const limit = std::min(max_drafts_, max_tokens_ - 1);
    bool const may_exit = drafts < limit && cost_ < exits_.steps() && !ends && !context_full;
    std::vector<Draft> ngram;
    if (!ends) ngram = ngram_drafts(max_tokens_ - 1 - drafts, length);
    StepRequest next{ids, drafts + static_cast<std::int64_t>(ngram.size()) + 1, !ngram.empty() || !may_exit};
    for (Draft const& draft : ngram) next.ids.push_back(draft.token.id);
    ngram_ = std::move(ngram);
    request_ = std::move(next);
  }

  // Adds tokens to the text that is searched.
  void extend(std::vector<std::int64_t> const& ids) {
    if (max_ngram_ > 0) lookup_.extend(ids);
  }

  // Drafts by prompt lookup after a sequence of `length` tokens that ends in the drafts: up to a stop token, and as
  // long as the next token is expected to save more than its verification costs.
  std::vector<Draft> ngram_drafts(std::int64_t max_tokens, std::int64_t length) {
    if (context_) max_tokens = std::min(max_tokens, *context_ - length);
    max_tokens = std::min(max_tokens, max_ngram_);
    std::vector<Draft> made;
    std::vector<std::int64_t> tokens;
    for (Draft const& draft : drafts_) tokens.push_back(draft.token.id);
    double share = 1;
    while (static_cast<std::int64_t>(made.size()) < max_tokens) {
      if (!made.empty() && stops_.count(tokens.back()) == 1) break;
      auto const match = lookup_.next(tokens);
      double const cost = verify_cost(verify_costs_, tokens.size());
      if (!match || cost - verify_cost(verify_costs_, drafts_.size()) > ngrams_.steps()) break;
      share *= acceptance_.of(match->source);
      if (share * kTokenValue < verify_cost(verify_costs_, tokens.size() + 1) - cost) break;
      if (!sampler_.take_draft(match->token)) break;
      made.push_back({{match->token, 0, 0}, match->source});
      tokens.push_back(match->token);
    }
    return made;
  }

  // The accepted drafts, and the full model's token after them, from its logits of every draft; `length` is that of the
  // sequence after the step. Does all that may throw before anything but the sampler changes.
  std::vector<Token> verify(StepResult const& result, std::int64_t passes, std::int64_t length) {
    std::size_t const exits = drafts_.size();
    std::vector<Draft> all = drafts_;
    all.insert(all.end(), ngram_.begin(), ngram_.end());
    std::vector<Token> tokens;
    Choice last = sampler_(result, 0);
    while (tokens.size() < all.size() && all[tokens.size()].token.id == last.id) {
      tokens.push_back(all[tokens.size()].token);
      tokens.back().logprobs = std::move(last.logprobs);
      last = sampler_(result, tokens.size());
    }
    std::size_t const num_accepted = tokens.size(), ngram_accepted = num_accepted - std::min(num_accepted, exits);
    std::int64_t rejected_passes = 0;
    for (std::size_t i = num_accepted; i < all.size(); ++i) rejected_passes += all[i].token.layers_run;
    tokens.push_back({last.id, result.exit_layer, passes + rejected_passes, std::move(last.logprobs)});
    std::vector<std::int64_t> ids;
    for (Token const& token : tokens) ids.push_back(token.id);
    std::vector<std::size_t> sources;
    for (Draft const& draft : ngram_) sources.push_back(*draft.source);
    extend(ids);
    settle(all.size(), exits, num_accepted, ngram_accepted, sources);
    length_ = length - static_cast<std::int64_t>(all.size() - num_accepted);
    return tokens;
  }

  // Counts a verification of `all` drafts, of which the first `exits` are early exits. sources: of the others.
  void settle(std::size_t all, std::size_t exits, std::size_t num_accepted, std::size_t ngram_accepted,
              std::vector<std::size_t> const& sources) noexcept {
    if (num_accepted >= exits) acceptance_.record(sources, ngram_accepted);
    double const exits_cost = verify_cost(verify_costs_, exits);
    exits_.settle(num_accepted - ngram_accepted, cost_ + exits_cost, num_accepted + 1);
    ngrams_.settle(ngram_accepted, verify_cost(verify_costs_, all) - exits_cost, num_accepted + 1);
    drafted += static_cast<std::int64_t>(all);
    accepted += static_cast<std::int64_t>(num_accepted);
    lookup_drafted += static_cast<std::int64_t>(all - exits);
    lookup_accepted += static_cast<std::int64_t>(ngram_accepted);
    undone += static_cast<std::int64_t>(all - num_accepted);
  }

  Sampler sampler_;
  std::vector<std::int64_t> const depths_;
  std::int64_t const max_drafts_;
  std::int64_t const max_ngram_;
  std::vector<double> const draft_costs_;
  std::vector<double> const verify_costs_;
  PromptLookup lookup_;
  Acceptance acceptance_;
  Balance exits_, ngrams_;
  std::set<std::int64_t> const stops_;
  std::optional<std::int64_t> const context_;
  std::int64_t max_tokens_ = 1;             // of the block
  double cost_ = 0;                         // of the block's early exits
  std::vector<Draft> drafts_;               // of the block, so far
  std::vector<Draft> ngram_;                // by prompt lookup after them in the requested step
};

}  // namespace

void check_drafting(Drafting const& drafting, std::size_t checkpoints) {
  auto const require = [](bool holds, char const* what) {
    if (!holds) throw GenerationError(std::string("drafting.") + what);
  };
  auto const costs = [](std::vector<double> const& values) {
    return std::all_of(values.begin(), values.end(), [](double value) { return value >= 0; });
  };
  require(drafting.max_drafts >= 0, "max_drafts must be 0 or more");
  require(drafting.prompt_lookup >= 0, "prompt_lookup must be 0 or more");
  require(drafting.draft_costs.size() >= checkpoints, "draft_costs must have one value per checkpoint");
  require(drafting.verify_costs.size() == 5, "verify_costs must have five values");
  require(costs(drafting.draft_costs), "draft_costs holds a negative value");
  require(costs(drafting.verify_costs), "verify_costs holds a negative value");
}

Drafting default_drafting(Manifest const& manifest) {
  Drafting drafting{manifest.thresholds, 6, 8, {}, {0.13, 0.18, 0.3, 0.54, 1.0}};
  for (std::size_t i = 0; i < manifest.checkpoints.size(); ++i) {
    double const layers = static_cast<double>(manifest.checkpoints[i]);
    double const cost = kHeadCost + layers / static_cast<double>(manifest.model.num_layers);
    if (!(cost + drafting.verify_costs[0] < kTokenValue)) drafting.thresholds[i] = 1;
    drafting.draft_costs.push_back(cost);
  }
  return drafting;
}

std::unique_ptr<Decoder> make_lossless_decoder(std::vector<std::int64_t> depths, std::optional<std::int64_t> context,
                                               Sampler sampler, DraftLimits const& limits,
                                               std::set<std::int64_t> const& stops) {
  return std::make_unique<LosslessDecoder>(std::move(depths), context, std::move(sampler), limits, stops);
}

}  // namespace tide

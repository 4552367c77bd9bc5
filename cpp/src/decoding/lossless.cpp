// Lossless mode: what leaves early is only a draft, and the deep segments' one run over all that waits verifies it. The
// rule is that of tide_export/runtime/decoding/lossless.py, which names the papers.
#include "decoding/decoder.h"

#include <algorithm>

namespace tide {
namespace {

class OneByOne final : public Decoder {
 public:
  OneByOne(Sampler sampler, std::vector<std::int64_t> depths)
      : sampler_(std::move(sampler)), depths_(std::move(depths)) {}

  void begin(std::vector<std::int64_t> const& ids, std::int64_t) override { request_.ids = ids; }

  std::vector<Token> take(StepResult const& result) override {
    length_ += static_cast<std::int64_t>(request_.ids.size());
    std::int64_t const passes = depths_[static_cast<std::size_t>(result.segments_run - 1)];
    return {{sampler_(result.last(), result.vocabulary), result.exit_layer, passes}};
  }

 private:
  Sampler sampler_;
  std::vector<std::int64_t> const depths_;
};

// A token that waits for its verification, and what it was drawn from (nothing if greedy).
struct Draft {
  Token token;
  Choices choices;
};

std::vector<double> dense(Choices const& choices, std::size_t vocabulary) {
  std::vector<double> probabilities(vocabulary, 0.0);
  for (std::size_t i = 0; i < choices.ids.size(); ++i) {
    probabilities[static_cast<std::size_t>(choices.ids[i])] = choices.weights[i];
  }
  return probabilities;
}

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

  void begin(std::vector<std::int64_t> const& ids, std::int64_t most) override {
    if (length_ == 0) lookup_.extend(ids);
    most_ = length_ == 0 ? 1 : most;  // a prompt is not worth a draft: it needs every layer
    drafts_.clear();
    ask(ids);
  }

  std::vector<Token> take(StepResult const& result) override {
    length_ += static_cast<std::int64_t>(request_.ids.size());
    std::int64_t const passes = depths_[static_cast<std::size_t>(result.segments_run - 1)];
    if (static_cast<std::size_t>(result.segments_run) == depths_.size()) {
      auto const early = static_cast<std::int64_t>(drafts_.size());
      for (std::int64_t const id : guess_) drafts_.push_back({{id, 0, 0}, certain(id)});
      return verified(early, result, passes);
    }
    drafts_.push_back(drawn(result, passes));
    ask({drafts_.back().token.id});
    return {};
  }

 private:
  // The step over `ids`: to draft one more behind them, or to verify all that was drafted.
  void ask(std::vector<std::int64_t> const& ids) {
    std::int64_t const length = length_ + static_cast<std::int64_t>(ids.size());
    auto const made = static_cast<std::int64_t>(drafts_.size());
    bool const ends = made > 0 && stops_.count(drafts_.back().token.id) == 1;
    bool const last_place = context_ && length == *context_;
    guess_ = ends ? std::vector<std::int64_t>{} : guessed(most_ - 1 - made, length);
    request_.ids = ids;
    request_.ids.insert(request_.ids.end(), guess_.begin(), guess_.end());
    request_.logits_to_keep = made + static_cast<std::int64_t>(guess_.size()) + 1;
    request_.full = !guess_.empty() || made >= std::min(max_drafts_, most_ - 1) || last_place || ends;
  }

  // What may follow a sequence of `length` tokens that ends in the drafts, with nothing behind a stop token.
  std::vector<std::int64_t> guessed(std::int64_t most, std::int64_t length) const {
    if (context_) most = std::min(most, *context_ - length);
    std::vector<std::int64_t> ids;
    for (Draft const& draft : drafts_) ids.push_back(draft.token.id);
    std::vector<std::int64_t> guess = lookup_.guess(ids, most);
    auto const stop =
        std::find_if(guess.begin(), guess.end(), [&](std::int64_t token) { return stops_.count(token) == 1; });
    if (stop != guess.end()) guess.erase(stop + 1, guess.end());
    return guess;
  }

  // What was looked up was not drawn: as if from a distribution of this token alone.
  Choices certain(std::int64_t id) const { return sampler_.greedy() ? Choices{} : Choices{{id}, {1.0}}; }

  Draft drawn(StepResult const& result, std::int64_t passes) {
    if (sampler_.greedy()) return {{sampler_(result.last(), result.vocabulary), result.exit_layer, passes}, {}};
    Choices choices = sampler_.distribution(result.last(), result.vocabulary);
    return {{sampler_.draw(choices), result.exit_layer, passes}, std::move(choices)};
  }

  // The drafts that stand, the first `early` of which were early exits and the others looked up, and the full model's
  // token behind them, from its logits of every draft.
  std::vector<Token> verified(std::int64_t early, StepResult const& result, std::int64_t passes) {
    std::vector<Token> tokens;
    std::optional<std::int64_t> last;
    while (!last && tokens.size() < drafts_.size()) {
      Draft const& draft = drafts_[tokens.size()];
      last = replacement(draft, result.row(tokens.size()), result.vocabulary);
      if (!last) tokens.push_back(draft.token);
    }
    if (!last) last = sampler_(result.last(), result.vocabulary);
    auto const stood = static_cast<std::int64_t>(tokens.size()), made = static_cast<std::int64_t>(drafts_.size());
    std::int64_t const looked = made - early;
    if (looked > 0 && stood >= early) lookup_.learn(looked, stood - early);
    drafted += made;
    accepted += stood;
    lookup_drafted += looked;
    lookup_accepted += std::max<std::int64_t>(stood - early, 0);
    undone += made - stood;
    length_ -= made - stood;
    std::int64_t in_vain = 0;
    for (auto draft = drafts_.begin() + stood; draft != drafts_.end(); ++draft) in_vain += draft->token.layers_run;
    tokens.push_back({*last, result.exit_layer, passes + in_vain});
    std::vector<std::int64_t> ids;
    for (Token const& token : tokens) ids.push_back(token.id);
    lookup_.extend(ids);
    return tokens;
  }

  // The full model's token where the draft falls, none where it stands. Rejection: with p the full model's
  // probabilities and q those the draft was drawn from, it stands with probability min(1, p / q); else the token is
  // drawn from max(p - q, 0), normalised.
  std::optional<std::int64_t> replacement(Draft const& draft, float const* logits, std::size_t vocabulary) {
    if (sampler_.greedy()) {
      std::int64_t const token = sampler_(logits, vocabulary);
      return token == draft.token.id ? std::nullopt : std::optional(token);
    }
    std::vector<double> const wanted = dense(sampler_.distribution(logits, vocabulary), vocabulary);
    std::vector<double> const given = dense(draft.choices, vocabulary);
    auto const id = static_cast<std::size_t>(draft.token.id);
    if (sampler_.uniform() * given[id] < wanted[id]) return std::nullopt;
    Choices left;
    for (std::size_t i = 0; i < vocabulary; ++i) {
      if (wanted[i] <= given[i]) continue;
      left.ids.push_back(static_cast<std::int64_t>(i));
      left.weights.push_back(wanted[i] - given[i]);
    }
    return sampler_.draw(left);
  }

  Sampler sampler_;
  std::vector<std::int64_t> const depths_;
  std::int64_t const max_drafts_;
  PromptLookup lookup_;
  std::set<std::int64_t> const stops_;
  std::optional<std::int64_t> const context_;
  std::int64_t most_ = 1;            // tokens the block may have
  std::vector<Draft> drafts_;        // of the block, so far
  std::vector<std::int64_t> guess_;  // looked up behind them, in the step that was asked for
};

}  // namespace

std::unique_ptr<Decoder> make_decoder(Manifest const& manifest, Sampler sampler,
                                      std::optional<DraftLimits> const& limits, std::set<std::int64_t> const& stops) {
  if (limits) return std::make_unique<LosslessDecoder>(manifest, std::move(sampler), *limits, stops);
  return std::make_unique<OneByOne>(std::move(sampler), manifest.depths());
}

std::vector<Token> run_block(Decoder& decoder, State& state) {
  std::vector<Token> tokens;
  while (tokens.empty()) {
    StepRequest const& step = decoder.request();
    tokens = decoder.take(state.step(step.ids, step.logits_to_keep, step.full));
  }
  if (state.length() > decoder.length()) state.rewind(decoder.length());
  return tokens;
}

}  // namespace tide

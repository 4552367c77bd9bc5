#include "decoding/lossless.h"

#include <algorithm>
#include <optional>

#include "decoding/acceptance.h"
#include "decoding/drafts.h"
#include "decoding/prompt_lookup.h"
#include "room.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr double kTokenValue = 0.75;  // of the cost of a step, what a token costs until it is known
constexpr std::int64_t kLead = 2;     // tokens before the last sequence that may come in useful
constexpr double kHorizon = 128;      // tokens over which running the drafter over old ones must pay
constexpr double kSpentTokens = 20, kSpentDecay = 0.97;

// A token that awaits verification.
struct Draft {
  Token token;
  std::size_t source;  // see `Acceptance`; 0 of an early exit
};

class LosslessDecoder final : public Decoder {
 public:
  LosslessDecoder(std::vector<std::int64_t> depths, std::optional<std::int64_t> context, Sampler sampler,
                  DraftLimits const& limits, std::set<std::int64_t> stops, DraftsInfo const* drafter,
                  std::shared_ptr<Balances> balances)
      : sampler_(std::move(sampler)),
        depths_(std::move(depths)),
        limits_(limits),
        costs_(limits.verify_costs, limits.drafter_cost),
        balances_(balances ? std::move(balances) : std::make_shared<Balances>()),
        stops_(std::move(stops)),
        context_(context),
        max_learned_(drafter == nullptr ? 0 : std::min(limits.drafter, drafter->max_rows / 2)),
        drafter_(max_learned_ > 0 ? drafter : nullptr) {
    if (drafter_ != nullptr) learned_ = Acceptance(drafter_->acceptance);
  }

  bool verifies() const override { return true; }
  bool reads_states() const override { return drafter_ != nullptr; }

  void begin(std::vector<std::int64_t> const& ids, std::int64_t max_tokens) override {
    if (length_ == 0) {
      sampler_.begin(ids);
      extend(ids);
    }
    max_tokens_ = length_ == 0 ? 1 : max_tokens;  // a prompt needs every layer: no draft
    drafts_.clear();
    ngram_.clear();
    exits_cost_ = drafter_cost_ = 0;
    share_ = 1;
    new_ids_ = ids;
    drafting_ = drafter_ != nullptr && length_ > 0;
    requested_ = by_drafter_ = false;
    sampler_.undo(sampler_.length());
  }

  StepRequest const& request() override {
    if (requested_) return request_;
    std::size_t const before = sampler_.with_drafts();
    try {
      request_step();
    } catch (...) {
      sampler_.undo(before);
      throw;
    }
    return request_;
  }

  bool asks_drafter(std::size_t sharing) const override {
    std::size_t const drafts = drafts_.size();
    if (!drafting_ || requested_ || (drafts > 0 && !by_drafter_) || waits()) return false;
    if (drafts == 0 && waiting_ids_.empty()) return false;
    if (ends() || static_cast<std::int64_t>(drafts) >= std::min(max_learned_, max_tokens_ - 1)) return false;
    if (context_ && length_ + static_cast<std::int64_t>(new_ids_.size() + drafts) >= *context_) return false;
    double const cost = costs_.draft(others, sharing), marginal = costs_.marginal(others, drafts);
    if (drafter_cost_ + cost + costs_.verify(others, drafts + 1) > balances_->learned.steps()) return false;
    double const gain =
        learned_.mean([&](double share) { return std::max(share_ * share * token_value() - marginal, 0.0); });
    if (gain < cost) return false;
    std::size_t const old = drafts > 0 ? 0 : waiting_ids_.size() - 1;  // which it runs over once and for all
    if ((gain - cost) * std::min(static_cast<double>(max_tokens_), kHorizon) < costs_.rows(others, old)) return false;
    if (limits_.prompt_lookup == 0) return true;
    auto const match = lookup_.next(ids_of(drafts_));  // an n-gram costs no draft
    double const share = match ? ngrams_share_.of(match->source) : 0.0;
    return share_ * share * token_value() - marginal <= gain - cost;
  }

  DraftRows const& draft_rows() override {
    if (drafts_.empty()) {  // the rows whose tokens and states are known since the drafter last ran
      auto const rows = static_cast<std::int64_t>(waiting_ids_.size());
      if (kept_rows_ + rows + max_learned_ > drafter_->max_rows) kept_rows_ = 0;
      rows_ = {kept_rows_, waiting_ids_, waiting_states_};
    }
    return rows_;
  }

  std::size_t planned() const override { return drafts_.size() + ngram_.size(); }

  void take_draft(DraftResult const& result, std::size_t sharing) override {
    std::size_t const before = sampler_.with_drafts();
    make_room(drafts_, 1);
    auto const drafted = sampler_.draft(result.logits, drafter_->tokens, vocabulary_, drafts_.size());
    DraftRows next;
    bool taken = false;
    try {
      if (drafted) {
        std::size_t const source = confidence_source(drafted->confidence);
        double const share = share_ * learned_.of(source);
        if (share * token_value() >= costs_.marginal(others, drafts_.size())) {
          next = {rows_.before + static_cast<std::int64_t>(rows_.ids.size()), {drafted->id},
                  {result.state, result.state + drafter_->width}};
          taken = true;
        }
        drafter_cost_ += costs_.draft(others, sharing);
        if (drafts_.empty()) {
          kept_rows_ += static_cast<std::int64_t>(rows_.ids.size());
          waiting_ids_.clear();
          waiting_states_.clear();
        }
        learned_.count(source);
        if (taken) {
          drafts_.push_back({{drafted->id, 0, 0}, source});
          share_ = share;
        }
      }
    } catch (...) {
      sampler_.undo(before);
      throw;
    }
    if (taken) {
      rows_ = std::move(next);
      by_drafter_ = true;
    } else {
      sampler_.undo(before);
      drafting_ = false;
    }
  }

  std::vector<Token> take(StepResult const& result) override {
    std::int64_t const passes = depths_[static_cast<std::size_t>(result.segments_run - 1)];
    auto const ran = static_cast<std::int64_t>(request_.ids.size());
    vocabulary_ = result.vocabulary;
    if (static_cast<std::size_t>(result.segments_run) == depths_.size()) {
      std::size_t const before = sampler_.length();
      try {
        return verify(result, passes, length_ + ran);
      } catch (...) {
        sampler_.rewind(before);
        throw;
      }
    }
    make_room(drafts_, 1);
    drafts_.push_back({{sampler_.draft(result), result.exit_layer, passes}, 0});
    length_ += ran;
    exits_cost_ += limits_.draft_costs[static_cast<std::size_t>(result.segments_run - 1)];
    requested_ = false;
    return {};
  }

 private:
  // What an accepted draft saves: what a token costs with drafts, as of late; without any it is 1.
  double token_value() const { return std::min(spent_ / made_, 1.0); }

  // Whether drafts would only make it wait longer for the last sequence.
  bool waits() const { return others.later > kLead; }

  // Whether the drafts end the generation.
  bool ends() const { return !drafts_.empty() && stops_.count(drafts_.back().token.id) == 1; }

  // Keeps the states of a step's tokens that stay, each with the token after it.
  //
  // next: the tokens after each that ran and stays, for which there is room. rejected: tokens that ran after these.
  void keep_rows(std::vector<std::int64_t> const& next, std::size_t rejected) noexcept {
    std::size_t rows = states_.size() / drafter_->width;
    rows = std::min(rows - std::min(rows, rejected), next.size());  // those of a prefix cache were not run
    auto const end = states_.begin() + static_cast<std::ptrdiff_t>(rows * drafter_->width);
    waiting_ids_.insert(waiting_ids_.end(), next.end() - static_cast<std::ptrdiff_t>(rows), next.end());
    waiting_states_.insert(waiting_states_.end(), states_.begin(), end);
    states_.clear();
    std::size_t const most = static_cast<std::size_t>(drafter_->max_rows) / 2;
    if (waiting_ids_.size() <= most) return;
    kept_rows_ = 0;  // the drafter begins anew with the last of them
    auto const gone = static_cast<std::ptrdiff_t>(waiting_ids_.size() - most);
    waiting_ids_.erase(waiting_ids_.begin(), waiting_ids_.begin() + gone);
    waiting_states_.erase(waiting_states_.begin(),
                          waiting_states_.begin() + gone * static_cast<std::ptrdiff_t>(drafter_->width));
  }

  static std::vector<std::int64_t> ids_of(std::vector<Draft> const& drafts) {
    std::vector<std::int64_t> ids;
    for (Draft const& draft : drafts) ids.push_back(draft.token.id);
    return ids;
  }

  // --- steps ---------------------------------------------------------------------------------------------------------

  // Requests the step that drafts one more token by an exit or verifies all drafts. Where it throws, only the sampler
  // may have changed.
  void request_step() {
    StepRequest next;
    bool const exited = !drafts_.empty() && !by_drafter_;  // all but the last were run
    if (!exited) next.ids = new_ids_;
    for (std::size_t i = exited ? drafts_.size() - 1 : 0; i < drafts_.size(); ++i) {
      next.ids.push_back(drafts_[i].token.id);
    }
    std::int64_t const length = length_ + static_cast<std::int64_t>(next.ids.size());
    auto const drafts = static_cast<std::int64_t>(drafts_.size());
    bool const context_full = context_ && length == *context_;
    bool const may_exit = !by_drafter_ && drafts < std::min(limits_.max_drafts, max_tokens_ - 1) &&
                          exits_cost_ < balances_->exits.steps() && !ends() && !context_full;
    std::vector<Draft> ngram;
    if (!ends() && !waits()) ngram = ngram_drafts(max_tokens_ - 1 - drafts, length);
    for (Draft const& draft : ngram) next.ids.push_back(draft.token.id);
    next.logits_to_keep = drafts + static_cast<std::int64_t>(ngram.size()) + 1;
    next.full = !ngram.empty() || !may_exit;
    ngram_ = std::move(ngram);
    request_ = std::move(next);
    requested_ = true;
  }

  // Adds tokens to the text that is searched.
  void extend(std::vector<std::int64_t> const& ids) {
    if (limits_.prompt_lookup > 0) lookup_.extend(ids);
  }

  // Drafts by prompt lookup after a sequence of `length` tokens that ends in the drafts: up to a stop token, and as
  // long as the next token is expected to save more than its verification costs.
  std::vector<Draft> ngram_drafts(std::int64_t max_tokens, std::int64_t length) {
    if (context_) max_tokens = std::min(max_tokens, *context_ - length);
    max_tokens = std::min(max_tokens, limits_.prompt_lookup);
    std::vector<Draft> made;
    std::vector<std::int64_t> tokens = ids_of(drafts_);
    double const before = costs_.verify(others, drafts_.size());
    double share = share_;
    while (static_cast<std::int64_t>(made.size()) < max_tokens) {
      if (!made.empty() && stops_.count(tokens.back()) == 1) break;
      auto const match = lookup_.next(tokens);
      if (!match || costs_.verify(others, tokens.size()) - before > balances_->ngrams.steps()) break;
      share *= ngrams_share_.of(match->source);
      if (share * token_value() < costs_.marginal(others, tokens.size())) break;
      if (!sampler_.take_draft(match->token)) break;
      made.push_back({{match->token, 0, 0}, match->source});
      tokens.push_back(match->token);
    }
    return made;
  }

  // The accepted drafts, and the full model's token after them, from its logits of every draft; `length` is that of the
  // sequence after the step. Does all that may throw before anything but the sampler changes.
  std::vector<Token> verify(StepResult const& result, std::int64_t passes, std::int64_t length) {
    std::vector<Draft> all = drafts_;
    all.insert(all.end(), ngram_.begin(), ngram_.end());
    std::vector<Token> tokens;
    Choice last = sampler_(result, 0);
    while (tokens.size() < all.size() && all[tokens.size()].token.id == last.id) {
      tokens.push_back(all[tokens.size()].token);
      tokens.back().logprobs = std::move(last.logprobs);
      last = sampler_(result, tokens.size());
    }
    std::size_t const num_accepted = tokens.size();
    std::int64_t rejected_passes = 0;
    for (std::size_t i = num_accepted; i < all.size(); ++i) rejected_passes += all[i].token.layers_run;
    tokens.push_back({last.id, result.exit_layer, passes + rejected_passes, std::move(last.logprobs)});
    std::vector<std::int64_t> ids;
    for (Token const& token : tokens) ids.push_back(token.id);
    std::vector<std::size_t> sources, ngram_sources;
    for (Draft const& draft : drafts_) sources.push_back(draft.source);
    for (Draft const& draft : ngram_) ngram_sources.push_back(draft.source);
    std::vector<std::int64_t> next;
    if (drafter_ != nullptr) {
      next.assign(new_ids_.begin() + 1, new_ids_.end());
      next.insert(next.end(), ids.begin(), ids.end());
      make_room(waiting_ids_, next.size());
      make_room(waiting_states_, next.size() * drafter_->width);
    }
    extend(ids);
    settle(sources, ngram_sources, num_accepted);
    if (drafter_ != nullptr) keep_rows(next, all.size() - num_accepted);
    length_ = length - static_cast<std::int64_t>(all.size() - num_accepted);
    return tokens;
  }

  // Counts a verification of drafts of these sources and then n-grams of those, of which the first `num_accepted` are
  // accepted.
  void settle(std::vector<std::size_t> const& sources, std::vector<std::size_t> const& ngram_sources,
              std::size_t num_accepted) noexcept {
    std::size_t const first = sources.size(), all = first + ngram_sources.size();
    std::size_t const ngram_accepted = num_accepted - std::min(num_accepted, first);
    if (num_accepted >= first) ngrams_share_.record(ngram_sources, ngram_accepted);
    double const first_cost = costs_.verify(others, first), cost = costs_.verify(others, all);
    std::size_t const tokens = num_accepted + 1;
    if (length_ > 0) {  // of the prompt no token could be drafted
      spent_ = spent_ * kSpentDecay + 1 + exits_cost_ + drafter_cost_ + cost;
      made_ = made_ * kSpentDecay + static_cast<double>(tokens);
    }
    double const first_gain = static_cast<double>(num_accepted - ngram_accepted) - first_cost;
    if (by_drafter_) learned_.record(sources, std::min(num_accepted, first));
    balances_->exits.settle((by_drafter_ ? 0.0 : first_gain) - exits_cost_, tokens);
    balances_->learned.settle((by_drafter_ ? first_gain : 0.0) - drafter_cost_, tokens);
    balances_->ngrams.settle(static_cast<double>(ngram_accepted) - cost + first_cost, tokens);
    drafted += static_cast<std::int64_t>(all);
    accepted += static_cast<std::int64_t>(num_accepted);
    lookup_drafted += static_cast<std::int64_t>(all - first);
    lookup_accepted += static_cast<std::int64_t>(ngram_accepted);
    if (by_drafter_) learned_drafted += static_cast<std::int64_t>(first);
    if (by_drafter_) learned_accepted += static_cast<std::int64_t>(num_accepted - ngram_accepted);
    undone += static_cast<std::int64_t>(all - num_accepted);
  }

  Sampler sampler_;
  std::vector<std::int64_t> const depths_;
  DraftLimits const limits_;
  DraftCosts const costs_;
  std::shared_ptr<Balances> const balances_;
  mutable PromptLookup lookup_;  // notes what was added when it is first asked
  Acceptance ngrams_share_ = Acceptance::of_ngrams(), learned_{std::vector<double>()};
  std::set<std::int64_t> const stops_;
  std::optional<std::int64_t> const context_;
  std::int64_t max_tokens_ = 1;        // of the block
  double exits_cost_ = 0, drafter_cost_ = 0;  // of the block's drafts so far, without their verification
  double spent_ = kTokenValue * kSpentTokens, made_ = kSpentTokens;  // what tokens of late cost, and how many
  double share_ = 1;                   // probability that all drafts of the block so far are accepted
  std::vector<std::int64_t> new_ids_;  // that begin the block
  std::vector<Draft> drafts_;          // of the block, so far: early exits or the drafter's
  std::vector<Draft> ngram_;           // by prompt lookup after them in the requested step
  bool requested_ = false;             // whether `request_` is the step to run next

  std::int64_t const max_learned_;    // drafts of the drafter before one verification
  DraftsInfo const* const drafter_;  // null: none
  bool by_drafter_ = false;           // whether the block's drafts are the drafter's
  bool drafting_ = false;             // whether it may be asked for the next one
  DraftRows rows_;
  std::int64_t kept_rows_ = 0;             // that it has of accepted tokens
  std::vector<std::int64_t> waiting_ids_;  // rows of accepted tokens that it has not run over
  std::vector<float> waiting_states_;      // [rows, width], before these
  std::size_t vocabulary_ = 0;
};

}  // namespace

std::unique_ptr<Decoder> make_lossless_decoder(std::vector<std::int64_t> depths, std::optional<std::int64_t> context,
                                               Sampler sampler, DraftLimits const& limits,
                                               std::set<std::int64_t> const& stops, DraftsInfo const* drafter,
                                               std::shared_ptr<Balances> balances) {
  return std::make_unique<LosslessDecoder>(std::move(depths), context, std::move(sampler), limits, stops, drafter,
                                           std::move(balances));
}

}  // namespace tide

#include "decoding/lossless.h"

#include <algorithm>
#include <cassert>
#include <optional>

#include "decoding/drafts.h"
#include "decoding/exit_drafts.h"
#include "decoding/shared_drafting.h"
#include "decoding/text_drafts.h"
#include "room.h"

namespace tide {
namespace {

constexpr double kTokenValue = 0.75;  // of the cost of a step, what a token costs until it is known
constexpr std::int64_t kLead = 2;     // tokens before the last sequence that may come in useful
constexpr double kHorizon = 128;      // tokens over which running the drafter over old ones must pay
constexpr double kSpentTokens = 20, kSpentDecay = 0.97;

// A token that awaits verification.
struct Draft {
  Token token;
  DraftSource source;
  std::size_t kind;  // of that source's drafts, see `Acceptance` and `ExitShares`

  bool is_text() const { return source == DraftSource::lookup || source == DraftSource::answers; }
};

class LosslessDecoder final : public Decoder {
  // What comes next in a block, which a function of this name does. `take_draft`, `request` and `take` go on to the next.
  enum class Phase {
    draft_learned,  // a draft of the drafter, as long as that pays
    plan,           // the choice of a step, with n-grams after the drafts so far
    draft_by_exit,  // that step's exit, which is a draft, and then another plan; where it does not exit it verifies
    verify,         // that step's verification of all drafts, of which some are accepted
    done            // nothing until a block begins
  };

 public:
  LosslessDecoder(std::vector<std::int64_t> depths, std::optional<std::int64_t> context, Sampler sampler,
                  DraftLimits const& limits, std::set<std::int64_t> stops, std::shared_ptr<SharedDrafting> shared,
                  DraftsInfo const* drafter, std::int64_t owner, std::vector<std::int64_t> prediction)
      : Decoder(std::move(sampler), std::move(depths)),
        limits_(limits),
        stops_(std::move(stops)),
        context_(context),
        prediction_(std::move(prediction)),
        max_learned_(drafter == nullptr ? 0 : std::min(limits.drafter, drafter->max_rows / 2)),
        drafter_(max_learned_ > 0 ? drafter : nullptr),
        costs_(limits.costs),
        shared_(std::move(shared)),
        text_(shared_, owner),
        learned_(drafter_ == nullptr ? std::vector<double>() : drafter_->acceptance) {
    shared_->record.balances.begin();
  }

  bool verifies() const override { return true; }
  bool reads_hidden() const override { return drafter_ != nullptr; }
  std::size_t planned() const override { return drafts_.size(); }

  void begin_block(std::vector<std::int64_t> const& ids, std::int64_t max_tokens) override {
    new_ids_ = ids;
    if (length_ == 0) {
      text_.extend(ids);
      text_.extend(prediction_);
    }
    max_tokens_ = length_ == 0 ? 1 : max_tokens;  // a prompt needs every layer: no draft
    drafts_.clear();
    exits_cost_ = drafter_cost_ = 0;
    share_ = 1;
    sampler_.undo(sampler_.length());
    phase_ = drafter_ != nullptr && length_ > 0 ? Phase::draft_learned : Phase::plan;
  }

  bool asks_drafter(std::size_t sharing) const override {
    return phase_ == Phase::draft_learned && room() > 0 &&
           (drafts_.empty() ? !waiting_.ids.empty() : drafter_->block_size == 0) && learned_pays(sharing);
  }

  // The rows of accepted tokens that it has not run over, then that of its last draft.
  DraftRows const& draft_rows() override {
    if (!drafts_.empty()) return last_;
    auto const rows = static_cast<std::int64_t>(waiting_.ids.size());
    if (waiting_.before + rows + std::max(max_learned_, drafter_->block_size) > drafter_->max_rows) waiting_.before = 0;
    return waiting_;
  }

  void take_draft(DraftResult const& result, std::size_t sharing) override {
    for (std::size_t i = 0; i < drafter_->drafts_of_run(); ++i) {
      std::size_t const before = sampler_.with_drafts();
      if (room() > 0 && draft_learned(result, i, sharing)) continue;
      sampler_.undo(before);
      phase_ = Phase::plan;
      return;
    }
  }

  StepRequest const& request() override {
    if (phase_ != Phase::draft_learned && phase_ != Phase::plan) return request_;
    std::size_t const before = sampler_.with_drafts();
    try {
      plan();
    } catch (...) {
      sampler_.undo(before);
      throw;
    }
    phase_ = request_.full ? Phase::verify : Phase::draft_by_exit;
    return request_;
  }

  std::vector<Token> take(StepResult const& result) override {
    assert(phase_ == Phase::draft_by_exit || phase_ == Phase::verify);
    vocabulary_ = result.vocabulary;
    if (static_cast<std::size_t>(result.segments_run) < depths_.size()) {
      draft_by_exit(result);
      phase_ = Phase::plan;
      return {};
    }
    std::size_t const before = sampler_.length();
    try {
      std::vector<Token> tokens = verify(result);
      accept(tokens);
      phase_ = Phase::done;
      return tokens;
    } catch (...) {
      sampler_.rewind(before);
      throw;
    }
  }

 private:
  // --- phases --------------------------------------------------------------------------------------------------------

  // For how many more drafts of the drafter there is room.
  std::size_t room() const {
    std::int64_t most = waits() || ends() ? 0 : std::min(max_learned_, max_tokens_ - 1);
    if (context_) most = std::min(most, *context_ - length_ - static_cast<std::int64_t>(new_ids_.size()));
    return static_cast<std::size_t>(std::max<std::int64_t>(most - static_cast<std::int64_t>(drafts_.size()), 0));
  }

  // Adds draft `i` of a run if it is worth its verification; returns whether it is. Where it throws nothing has changed.
  bool draft_learned(DraftResult const& result, std::size_t i, std::size_t sharing) {
    DraftRows const& ran = drafts_.empty() ? waiting_ : last_;
    std::int64_t const rows = ran.before + static_cast<std::int64_t>(ran.ids.size());
    DraftRows next{rows, {0}, {}};
    if (result.hidden != nullptr) next.hidden.assign(result.hidden, result.hidden + drafter_->width);
    make_room(drafts_, 1);
    float const* const logits = result.logits + i * drafter_->tokens.size();
    auto const drafted = sampler_.draft(logits, drafter_->tokens, vocabulary_, drafts_.size());
    if (!drafted) return false;
    std::size_t const kind = confidence_source(drafted->confidence);
    if (i == 0) drafter_cost_ += costs_.draft(others_, sharing);
    learned_.count(kind);
    if (drafts_.empty()) waiting_ = {rows, {}, {}};
    double const share = share_ * learned_.of(kind);
    if (gain(share, drafts_.size()) < 0) return false;
    share_ = share;
    drafts_.push_back({{drafted->id, 0, 0}, DraftSource::learned, kind});
    next.ids[0] = drafted->id;
    last_ = std::move(next);
    return true;
  }

  // Requests the step that drafts one more token by an exit or verifies all drafts. Where it throws, only the sampler may
  // have changed.
  void plan() {
    std::size_t const first = drafts_.size(), ran = drafted_by(DraftSource::exit) ? first - 1 : 0;
    StepRequest next;
    if (!drafted_by(DraftSource::exit)) next.ids = new_ids_;
    auto const length = length_ + static_cast<std::int64_t>(next.ids.size() + first - ran);
    std::vector<Draft> drafts = drafts_;
    ExitChoice exit = may_exit(length) ? choose_exit() : ExitChoice();
    if (!ends() && !waits()) draft_ngrams(drafts, length, exit.gain);
    for (std::size_t i = ran; i < drafts.size(); ++i) next.ids.push_back(drafts[i].token.id);
    next.logits_to_keep = static_cast<std::int64_t>(drafts.size()) + 1;
    next.full = drafts.size() > first || exit.thresholds.empty();
    if (!next.full) next.thresholds = std::move(exit.thresholds);
    drafts_ = std::move(drafts);
    request_ = std::move(next);
  }

  // Whether the step after which the sequence has so many tokens may draft one more by an exit.
  bool may_exit(std::int64_t length) const {
    auto const drafts = static_cast<std::int64_t>(drafts_.size());
    return !drafted_by(DraftSource::learned) && drafts < std::min(limits_.max_drafts, max_tokens_ - 1) &&
           !ends() && length != context_;
  }

  // Where one more draft by an exit is expected to pay; as long as they may lose so much, also to find out whether it does.
  ExitChoice choose_exit() const {
    ExitWorth worth{share_ * token_value(), limits_.costs.exits, limits_.thresholds};
    for (std::size_t k = 0; k < worth.costs.size(); ++k) worth.costs[k] += verifying(drafts_.size(), depths_[k]);
    return shared_->record.exits.choose(worth, exits_cost_ < shared_->record.balances.exits.steps());
  }

  // Adds n-grams to the drafts, after which the sequence has `length` tokens: up to a stop token, and as long as the next
  // token is expected to save more than its verification costs, the first one more than `exit_gain`.
  void draft_ngrams(std::vector<Draft>& drafts, std::int64_t length, double exit_gain) {
    std::int64_t most = std::min(max_tokens_ - 1 - static_cast<std::int64_t>(drafts.size()), limits_.prompt_lookup);
    if (context_) most = std::min(most, *context_ - length);
    std::vector<std::int64_t> tokens = ids_of(drafts);
    double const before = costs_.verify(others_, drafts.size());
    double share = share_;
    for (std::int64_t made = 0; made < most; ++made) {
      if (made > 0 && stops_.count(tokens.back()) == 1) return;
      auto const draft = text_.next(tokens);
      if (!draft || costs_.verify(others_, tokens.size()) - before > shared_->record.balances.ngrams.steps()) return;
      share *= draft->share;
      if (gain(share, tokens.size()) < (made == 0 ? exit_gain : 0) || !sampler_.take_draft(draft->token)) return;
      tokens.push_back(draft->token);
      drafts.push_back({{draft->token, 0, 0}, draft->source, draft->kind});
    }
  }

  void draft_by_exit(StepResult const& result) {
    make_room(drafts_, 1);
    std::int64_t const id = sampler_.draft(result, drafts_.size());
    auto const checkpoint = static_cast<std::size_t>(result.segments_run - 1);
    bool const scored = result.scores != nullptr;  // else all that was known of the score is that it was above the threshold
    double const score = scored ? result.scores[checkpoint] : std::max(request_.thresholds[checkpoint], 0.0F);
    std::size_t const kind = ExitShares::kind(checkpoint, score);
    if (scored) shared_->record.exits.see(result.scores, checkpoint + 1);
    share_ *= shared_->record.exits.of(kind);
    drafts_.push_back({{id, result.exit_layer, passes(result)}, DraftSource::exit, kind});
    length_ += static_cast<std::int64_t>(request_.ids.size());
    exits_cost_ += limits_.costs.exits[checkpoint];
  }

  // The drafts that the full model chooses too, from its logits of every draft, and its token after them. Only the sampler
  // changes.
  std::vector<Token> verify(StepResult const& result) {
    std::vector<Token> tokens;
    Choice last = sampler_(result, 0);
    while (tokens.size() < drafts_.size() && drafts_[tokens.size()].token.id == last.id) {
      tokens.push_back(drafts_[tokens.size()].token);
      tokens.back().logprobs = std::move(last.logprobs);
      last = sampler_(result, tokens.size());
    }
    std::int64_t layers_run = passes(result);
    for (std::size_t i = tokens.size(); i < drafts_.size(); ++i) layers_run += drafts_[i].token.layers_run;
    tokens.push_back({last.id, result.exit_layer, layers_run, std::move(last.logprobs)});
    return tokens;
  }

  // Makes these tokens part of the sequence, and the rejected drafts not. Where it throws nothing has changed.
  void accept(std::vector<Token> const& tokens) {
    std::size_t const accepted = tokens.size() - 1, rejected = drafts_.size() - accepted;
    std::vector<std::int64_t> ids, next;
    for (Token const& token : tokens) ids.push_back(token.id);
    if (drafter_ != nullptr) {
      next.assign(new_ids_.begin() + 1, new_ids_.end());
      next.insert(next.end(), ids.begin(), ids.end());
      make_room(waiting_.ids, next.size());
      make_room(waiting_.hidden, next.size() * drafter_->width);
    }
    text_.extend(ids);
    settle(accepted);
    if (drafter_ != nullptr) keep_rows(next, rejected);
    length_ += static_cast<std::int64_t>(request_.ids.size()) - static_cast<std::int64_t>(rejected);
  }

  // Keeps the hidden states of a step's tokens that stay, each with the token after it.
  //
  // next: the tokens after each that ran and stays, for which there is room. rejected: tokens that ran after these.
  void keep_rows(std::vector<std::int64_t> const& next, std::size_t rejected) noexcept {
    std::size_t rows = hidden_.size() / drafter_->width;
    rows = std::min(rows - std::min(rows, rejected), next.size());  // those of a prefix cache were not run
    auto const end = hidden_.begin() + static_cast<std::ptrdiff_t>(rows * drafter_->width);
    waiting_.ids.insert(waiting_.ids.end(), next.end() - static_cast<std::ptrdiff_t>(rows), next.end());
    waiting_.hidden.insert(waiting_.hidden.end(), hidden_.begin(), end);
    hidden_.clear();
    std::size_t const most = drafter_->catches_up ? static_cast<std::size_t>(drafter_->max_rows) / 2 : 1;
    if (waiting_.ids.size() <= most) return;
    waiting_.before = 0;  // the drafter begins anew with the last of them
    auto const gone = static_cast<std::ptrdiff_t>(waiting_.ids.size() - most);
    waiting_.ids.erase(waiting_.ids.begin(), waiting_.ids.begin() + gone);
    waiting_.hidden.erase(waiting_.hidden.begin(),
                          waiting_.hidden.begin() + gone * static_cast<std::ptrdiff_t>(drafter_->width));
  }

  // --- what drafts are worth -----------------------------------------------------------------------------------------

  // What an accepted draft saves: what a token costs with drafts, as of late; without any it is 1.
  double token_value() const { return std::min(spent_ / made_, 1.0); }

  // What a draft after so many saves less its verification, if all are accepted with this probability.
  double gain(double share, std::size_t drafts) const { return share * token_value() - costs_.marginal(others_, drafts); }

  // What verifying a draft after so many costs, of whose layers so many have run.
  double verifying(std::size_t drafts, std::int64_t layers) const {
    return costs_.marginal(others_, drafts) * (1 - static_cast<double>(layers) / static_cast<double>(depths_.back()));
  }

  // Whether drafts would only make it wait longer for the last sequence.
  bool waits() const { return others_.later > kLead; }

  // Whether a run of the drafter, for `sharing` sequences, is expected to save more than it costs.
  bool learned_pays(std::size_t sharing) const {
    std::size_t const drafts = drafts_.size();
    double const cost = costs_.draft(others_, sharing);
    if (drafter_cost_ + cost + costs_.verify(others_, drafts + 1) > shared_->record.balances.learned.steps()) return false;
    double gained = -cost, before = 1;  // `before`: that all drafts before one of this run are accepted
    for (std::size_t i = 0; i < std::min(drafter_->drafts_of_run(), room()); ++i) {
      gained += learned_.mean([&](double share) { return std::max(gain(share_ * before * share, drafts + i), 0.0); });
      before *= learned_.mean([](double share) { return share; });
    }
    std::size_t const old = drafts > 0 ? 0 : waiting_.ids.size() - 1;  // which it runs over once and for all
    double const over_all = gained * std::min(static_cast<double>(max_tokens_), kHorizon);
    if (gained < 0 || over_all < costs_.rows(others_, old)) return false;
    auto const text = limits_.prompt_lookup > 0 ? text_.next(ids_of(drafts_)) : std::nullopt;  // which costs no draft
    return gain(share_ * (text ? text->share : 0.0), drafts) <= gained;
  }

  void record(Draft const& draft, bool accepted) noexcept {
    if (draft.is_text()) return text_.record(draft.source, draft.kind, accepted);
    if (draft.source == DraftSource::exit) return shared_->record.exits.record(draft.kind, accepted);
    learned_.record(draft.kind, accepted);
  }

  // Counts a verification, which accepted so many of the drafts. Those after the first rejected show nothing.
  void settle(std::size_t accepted) noexcept {
    std::size_t const all = drafts_.size(), tokens = accepted + 1;
    std::size_t first = 0;  // before those from text
    double first_cost = 0, cost = 0;
    for (std::size_t i = 0; i < all; ++i) {
      Draft const& draft = drafts_[i];
      double const verified = verifying(i, draft.token.exit_layer);
      cost += verified;
      if (!draft.is_text()) ++first, first_cost = cost;
      if (i < tokens) record(draft, i < accepted);
      DraftCounts::Of& count = counts_.of(draft.source);
      ++count.drafted;
      count.accepted += i < accepted ? 1 : 0;
      count.saved += (i < accepted ? 1 : 0) - verified;
    }
    counts_.of(DraftSource::exit).saved -= exits_cost_;
    counts_.of(DraftSource::learned).saved -= drafter_cost_;
    std::size_t const first_accepted = std::min(accepted, first), ngrams_accepted = accepted - first_accepted;
    if (length_ > 0) {  // of the prompt no token could be drafted
      double const spent = 1 + exits_cost_ + drafter_cost_ + cost;
      counts_.spent += spent;
      spent_ = spent_ * kSpentDecay + spent;
      made_ = made_ * kSpentDecay + static_cast<double>(tokens);
    }
    double const first_gain = static_cast<double>(first_accepted) - first_cost;
    bool const learned = drafted_by(DraftSource::learned);
    shared_->record.balances.exits.settle((learned ? 0.0 : first_gain) - exits_cost_, tokens);
    shared_->record.balances.learned.settle((learned ? first_gain : 0.0) - drafter_cost_, tokens);
    shared_->record.balances.ngrams.settle(static_cast<double>(ngrams_accepted) - cost + first_cost, tokens);
  }

  // Whether the drafts are by exits or by the drafter, not counting n-grams after them.
  bool drafted_by(DraftSource source) const { return !drafts_.empty() && drafts_[0].source == source; }

  // Whether the drafts end the generation.
  bool ends() const { return !drafts_.empty() && stops_.count(drafts_.back().token.id) == 1; }

  static std::vector<std::int64_t> ids_of(std::vector<Draft> const& drafts) {
    std::vector<std::int64_t> ids;
    for (Draft const& draft : drafts) ids.push_back(draft.token.id);
    return ids;
  }

  DraftLimits const limits_;
  std::set<std::int64_t> const stops_;
  std::optional<std::int64_t> const context_;
  std::vector<std::int64_t> const prediction_;
  std::int64_t const max_learned_;   // drafts of the drafter before one verification
  DraftsInfo const* const drafter_;  // null: none

  Phase phase_ = Phase::done;
  std::int64_t max_tokens_ = 1;        // of the block
  std::vector<std::int64_t> new_ids_;  // that begin the block
  std::vector<Draft> drafts_;          // of the block, so far: by exits or by the drafter, then n-grams
  DraftRows waiting_, last_;           // of the drafter: of accepted tokens that it has not run over, of its last draft
  std::size_t vocabulary_ = 0;

  DraftCosts const costs_;
  std::shared_ptr<SharedDrafting> const shared_;
  TextDrafts text_;
  Acceptance learned_;
  double share_ = 1;                                                 // probability that all drafts so far are accepted
  double exits_cost_ = 0, drafter_cost_ = 0;                         // of these, without their verification
  double spent_ = kTokenValue * kSpentTokens, made_ = kSpentTokens;  // what tokens of late cost, and how many
};

}  // namespace

std::unique_ptr<Decoder> make_lossless_decoder(std::vector<std::int64_t> depths, std::optional<std::int64_t> context,
                                               Sampler sampler, DraftLimits const& limits,
                                               std::set<std::int64_t> const& stops,
                                               std::shared_ptr<SharedDrafting> shared, DraftsInfo const* drafter,
                                               std::int64_t owner,
                                               std::vector<std::int64_t> prediction) {
  return std::make_unique<LosslessDecoder>(std::move(depths), context, std::move(sampler), limits, stops, std::move(shared),
                                           drafter, owner, std::move(prediction));
}

}  // namespace tide

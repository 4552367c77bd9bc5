// Drafts that follow an earlier occurrence of the text's last n-gram, in the text or in answers to earlier requests.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "decoding/decoder.h"
#include "decoding/prompt_lookup.h"
#include "decoding/shared_drafting.h"

namespace tide {

struct TextDraft {
  std::int64_t token;
  DraftSource source;  // lookup or answers
  std::size_t kind;    // of that source's drafts, see `Acceptance`
  double share;        // that it is accepted, if the drafts before it are
};

// Of one sequence.
class TextDrafts {
 public:
  // shared: with earlier answers or without. owner: of those that it may draft from.
  TextDrafts(std::shared_ptr<SharedDrafting> shared, std::int64_t owner) : shared_(std::move(shared)), owner_(owner) {}

  // Adds tokens that are certain to the text.
  void extend(std::vector<std::int64_t> const& ids) { lookup_.extend(ids); }

  // The one that is accepted most often after these drafts; none: no n-gram at their end occurred before.
  std::optional<TextDraft> next(std::vector<std::int64_t> const& drafts) const {
    std::optional<TextDraft> best;
    auto const consider = [&](std::optional<PromptLookup::Match> const& match, DraftSource source, Acceptance const& of) {
      if (!match || (best && of.of(match->source) <= best->share)) return;
      best = TextDraft{match->token, source, match->source, of.of(match->source)};
    };
    consider(lookup_.next(drafts), DraftSource::lookup, ngrams_);
    auto const& answers = shared_->answers;
    if (answers) consider(answers->next(owner_, lookup_.tail(drafts)), DraftSource::answers, answers->shares);
    return best;
  }

  void record(DraftSource source, std::size_t kind, bool accepted) noexcept {
    (source == DraftSource::lookup ? ngrams_ : shared_->answers->shares).record(kind, accepted);
  }

 private:
  mutable PromptLookup lookup_;  // notes what was added when it is first asked
  Acceptance ngrams_ = Acceptance::of_ngrams();
  std::shared_ptr<SharedDrafting> shared_;
  std::int64_t owner_;
};

}  // namespace tide

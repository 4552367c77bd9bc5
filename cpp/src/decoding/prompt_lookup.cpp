#include "decoding/prompt_lookup.h"

#include <algorithm>

namespace tide {

PromptLookup::Gram PromptLookup::last(std::vector<std::int64_t> const& ids, std::size_t count) {
  Gram gram;
  gram.fill(-1);
  std::copy(ids.end() - static_cast<std::ptrdiff_t>(count), ids.end(), gram.end() - static_cast<std::ptrdiff_t>(count));
  return gram;
}

void PromptLookup::extend(std::vector<std::int64_t> const& ids) {
  if (max_tokens_ == 0) return;
  for (std::int64_t const token : ids) {
    for (std::size_t n = kMaxMatch; n > 0 && static_cast<std::int64_t>(n) >= min_match_; --n) {
      if (n <= text_.size()) follows_[last(text_, n)] = text_.size();
    }
    text_.push_back(token);
  }
}

std::vector<std::int64_t> PromptLookup::draft(std::vector<std::int64_t> const& drafts, std::int64_t max_tokens) const {
  max_tokens = std::min(max_tokens, length_);
  if (max_tokens < 1) return {};
  auto const count = static_cast<std::size_t>(max_tokens);
  std::vector<std::int64_t> tail(text_.end() - static_cast<std::ptrdiff_t>(std::min(kMaxMatch, text_.size())),
                                 text_.end());
  tail.insert(tail.end(), drafts.begin(), drafts.end());
  for (std::size_t n = kMaxMatch; n > 0 && static_cast<std::int64_t>(n) >= min_match_; --n) {
    if (n > tail.size()) continue;
    auto const match = follows_.find(last(tail, n));
    if (match == follows_.end()) continue;
    std::vector<std::int64_t> next(text_.begin() + static_cast<std::ptrdiff_t>(match->second), text_.end());
    next.insert(next.end(), drafts.begin(), drafts.end());
    // At the end of the text the draft repeats itself: a text that repeats mostly goes on repeating.
    for (std::size_t i = 0; next.size() < count; ++i) next.push_back(next[i]);
    next.resize(count);
    return next;
  }
  return {};
}

void PromptLookup::update(std::int64_t drafted, std::int64_t accepted) {
  length_ = std::min(max_tokens_, accepted == drafted ? 2 * length_ : accepted + 1);  // rejected drafts cost time
}

}  // namespace tide

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
  if (most_ == 0) return;
  for (std::int64_t const token : ids) {
    for (std::size_t n = kLongest; n > 0 && static_cast<std::int64_t>(n) >= least_match_; --n) {
      if (n <= text_.size()) follows_[last(text_, n)] = text_.size();
    }
    text_.push_back(token);
  }
}

std::vector<std::int64_t> PromptLookup::guess(std::vector<std::int64_t> const& drafts, std::int64_t most) const {
  most = std::min(most, length_);
  if (most < 1) return {};
  auto const count = static_cast<std::size_t>(most);
  std::vector<std::int64_t> tail(text_.end() - static_cast<std::ptrdiff_t>(std::min(kLongest, text_.size())),
                                 text_.end());
  tail.insert(tail.end(), drafts.begin(), drafts.end());
  for (std::size_t n = kLongest; n > 0 && static_cast<std::int64_t>(n) >= least_match_; --n) {
    if (n > tail.size()) continue;
    auto const found = follows_.find(last(tail, n));
    if (found == follows_.end()) continue;
    std::vector<std::int64_t> known(text_.begin() + static_cast<std::ptrdiff_t>(found->second), text_.end());
    known.insert(known.end(), drafts.begin(), drafts.end());
    // Where the end is reached: a text that repeats itself goes on doing so.
    for (std::size_t i = 0; known.size() < count; ++i) known.push_back(known[i]);
    known.resize(count);
    return known;
  }
  return {};
}

void PromptLookup::learn(std::int64_t guessed, std::int64_t stood) {
  length_ = std::min(most_, stood == guessed ? 2 * length_ : stood + 1);  // what fails costs less
}

}  // namespace tide

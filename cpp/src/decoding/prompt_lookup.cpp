#include "decoding/prompt_lookup.h"

#include <algorithm>

namespace tide {

PromptLookup::Ngram PromptLookup::last(std::vector<std::int64_t> const& ids, std::size_t count) {
  Ngram ngram;
  ngram.fill(-1);
  auto const size = static_cast<std::ptrdiff_t>(count);
  std::copy(ids.end() - size, ids.end(), ngram.end() - size);
  return ngram;
}

void PromptLookup::extend(std::vector<std::int64_t> const& ids) {
  for (std::int64_t const token : ids) {
    for (std::size_t n = 1; n <= std::min(kMaxNgram, text_.size()); ++n) {
      auto const [entry, is_new] = follows_.try_emplace(last(text_, n), Following{text_.size(), 0});
      if (is_new) continue;
      Following& following = entry->second;
      following = {text_.size(), text_[following.position] == token ? following.agreements + 1 : 0};
    }
    text_.push_back(token);
  }
}

std::optional<PromptLookup::Match> PromptLookup::next(std::vector<std::int64_t> const& drafts) const {
  std::vector<std::int64_t> tail(text_.end() - static_cast<std::ptrdiff_t>(std::min(kMaxNgram, text_.size())),
                                 text_.end());
  tail.insert(tail.end(), drafts.begin(), drafts.end());
  for (std::size_t n = std::min(kMaxNgram, tail.size()); n > 0; --n) {
    auto const match = follows_.find(last(tail, n));
    if (match != follows_.end()) return Match{text_[match->second.position], ngram_source(n, match->second.agreements)};
  }
  return std::nullopt;
}

}  // namespace tide

#include "decoding/prompt_lookup.h"

#include <algorithm>

namespace tide {

PromptLookup::Ngram PromptLookup::before(std::vector<std::int64_t> const& ids, std::size_t end, std::size_t count) {
  Ngram ngram;
  ngram.fill(-1);
  auto const from = ids.begin() + static_cast<std::ptrdiff_t>(end - count);
  std::copy_n(from, count, ngram.end() - static_cast<std::ptrdiff_t>(count));
  return ngram;
}

// A note that an exception ended is made again: what it has noted stays.
void PromptLookup::note(std::size_t position) {
  for (std::size_t n = 1; n <= std::min(kMaxNgram, position); ++n) {
    auto const [entry, is_new] = follows_.try_emplace(before(text_, position, n), Following{position, 0});
    Following& following = entry->second;
    if (is_new || following.position == position) continue;
    bool const agrees = text_[following.position] == text_[position];
    following = {position, agrees ? following.agreements + 1 : 0};
  }
}

std::vector<std::int64_t> PromptLookup::tail(std::vector<std::int64_t> const& drafts) const {
  std::vector<std::int64_t> tokens(text_.end() - static_cast<std::ptrdiff_t>(std::min(kMaxNgram, text_.size())), text_.end());
  tokens.insert(tokens.end(), drafts.begin(), drafts.end());
  return tokens;
}

std::optional<PromptLookup::Match> PromptLookup::next(std::vector<std::int64_t> const& drafts) {
  for (; noted_ < text_.size(); ++noted_) note(noted_);
  std::vector<std::int64_t> const last = tail(drafts);
  for (std::size_t n = std::min(kMaxNgram, last.size()); n > 0; --n) {
    auto const match = follows_.find(before(last, last.size(), n));
    if (match != follows_.end()) return Match{text_[match->second.position], ngram_source(n, match->second.agreements)};
  }
  return std::nullopt;
}

}  // namespace tide

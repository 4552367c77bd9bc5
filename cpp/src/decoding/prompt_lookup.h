// Drafts by prompt lookup: the tokens that followed an earlier occurrence of the text's last n-gram.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "decoding/acceptance.h"

namespace tide {

class PromptLookup {
 public:
  // A token that may follow, and the source of its draft.
  struct Match {
    std::int64_t token;
    std::size_t source;
  };

  // Adds tokens that are certain to the text.
  void extend(std::vector<std::int64_t> const& ids) { text_.insert(text_.end(), ids.begin(), ids.end()); }

  // The last tokens of the text, at most kMaxNgram, and then `drafts`.
  std::vector<std::int64_t> tail(std::vector<std::int64_t> const& drafts) const;

  // The token that followed the longest n-gram at the end of the text and then `drafts` where it occurred last; none
  // if no token of it occurred before. Where it throws, the next call finds the same.
  std::optional<Match> next(std::vector<std::int64_t> const& drafts);

 private:
  using Ngram = std::array<std::int64_t, kMaxNgram>;  // padded in front with -1, which is no token
  struct Following {
    std::size_t position;     // index in the text of the token after the last occurrence
    std::int64_t agreements;  // times in a row that the same token was there before
  };

  // The `count` tokens before index `end` of `ids`.
  static Ngram before(std::vector<std::int64_t> const& ids, std::size_t end, std::size_t count);

  void note(std::size_t position);  // what the token at this index of the text follows

  std::vector<std::int64_t> text_;
  std::size_t noted_ = 0;  // tokens of the text, from the first on
  std::map<Ngram, Following> follows_;
};

}  // namespace tide

// Prompt lookup decoding: drafts the tokens that followed an earlier occurrence of the text's last n-gram. See
// tide_export/runtime/decoding/prompt_lookup.py.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <vector>

namespace tide {

class PromptLookup {
 public:
  // max_tokens: tokens of one draft; 0 never drafts. min_match: length of the shortest n-gram to match, 1 to 4.
  PromptLookup(std::int64_t max_tokens, std::int64_t min_match)
      : max_tokens_(max_tokens), length_(max_tokens), min_match_(min_match) {}

  // Adds tokens that are certain to the text.
  void extend(std::vector<std::int64_t> const& ids);

  // Up to `max_tokens` tokens that may follow the text and the `drafts` after it; empty without a match.
  std::vector<std::int64_t> draft(std::vector<std::int64_t> const& drafts, std::int64_t max_tokens) const;

  // Adapts the length of the next draft: `accepted` of the last draft's `drafted` tokens were.
  void update(std::int64_t drafted, std::int64_t accepted);

 private:
  static constexpr std::size_t kMaxMatch = 4;  // length of the longest n-gram to match; longer ones predict no better
  using Gram = std::array<std::int64_t, kMaxMatch>;  // padded in front with -1, which is no token

  static Gram last(std::vector<std::int64_t> const& ids, std::size_t count);

  std::int64_t max_tokens_, length_, min_match_;
  std::vector<std::int64_t> text_;
  std::map<Gram, std::size_t> follows_;  // n-gram -> index in the text of the token after its last occurrence
};

}  // namespace tide

// Drafts from the text itself: what followed when its last few tokens stood there before (prompt lookup decoding; see
// tide_export/runtime/decoding/prompt_lookup.py).
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <vector>

namespace tide {

class PromptLookup {
 public:
  // most: tokens of one guess; 0 never guesses. min_match: tokens that must have stood there before, 1 to 4.
  PromptLookup(std::int64_t most, std::int64_t min_match) : most_(most), length_(most), least_match_(min_match) {}

  // Adds tokens that are certain.
  void extend(std::vector<std::int64_t> const& ids);

  // Up to `most` tokens that may follow the text and `drafts` behind it; empty where nothing is known.
  std::vector<std::int64_t> guess(std::vector<std::int64_t> const& drafts, std::int64_t most) const;

  // Of the last guess, of `guessed` tokens, the first `stood` were right: the next is longer, or shorter.
  void learn(std::int64_t guessed, std::int64_t stood);

 private:
  static constexpr std::size_t kLongest = 4;  // tokens that are looked for at first; further back does not tell more
  using Gram = std::array<std::int64_t, kLongest>;  // padded in front with -1, which is no token

  static Gram last(std::vector<std::int64_t> const& ids, std::size_t count);

  std::int64_t most_, length_, least_match_;
  std::vector<std::int64_t> text_;
  std::map<Gram, std::size_t> follows_;  // n-gram -> where the token behind its last occurrence stands
};

}  // namespace tide

// Drafts from the answers to earlier requests: the tokens that followed an earlier occurrence of the text's last n-gram.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "decoding/acceptance.h"
#include "decoding/prompt_lookup.h"
#include "tide/runtime.h"

namespace tide {

// Keeps the newest answers in a ring of tokens, with a hash table from their n-grams to the tokens after them. A later n-gram
// takes the place of another of the same hash, so that nothing is allocated after the beginning; whether an n-gram is there is
// seen from its tokens. May be used by one thread at a time.
class EarlierAnswers {
 public:
  // bytes: of memory, at most.
  explicit EarlierAnswers(std::size_t bytes);

  // Adds an answer, after the last tokens of its prompt. owner: whose later answers may draft from it.
  void add(std::int64_t owner, std::vector<std::int64_t> const& prompt, std::vector<Token> const& answer) noexcept;

  // The token that followed the longest n-gram at the end of `tail` in an answer of the same owner; none: there is none.
  std::optional<PromptLookup::Match> next(std::int64_t owner, std::vector<std::int64_t> const& tail) const noexcept;

  Acceptance shares = Acceptance::of_ngrams();  // of all owners' drafts

 private:
  struct Following {
    std::int64_t owner;
    std::uint64_t position;   // of the token after the n-gram, counted from the first that was ever added; 0: none
    std::int64_t agreements;  // times in a row that the same token was there before
  };

  std::int32_t& at(std::uint64_t position) { return text_[position % text_.size()]; }
  std::int32_t at(std::uint64_t position) const { return text_[position % text_.size()]; }

  void add(std::int64_t owner, std::int64_t id) noexcept;  // after those of `last_`

  // Where the n-gram of the `count` tokens before `end` is noted.
  std::size_t place(std::int64_t owner, std::int64_t const* end, std::size_t count) const noexcept;

  // Whether this is noted of these tokens, which are still there.
  bool holds(Following const& following, std::int64_t owner, std::int64_t const* end, std::size_t count) const noexcept;

  std::vector<std::int32_t> text_;
  std::vector<Following> follows_;
  std::vector<std::int64_t> last_;  // tokens of the text that is added, at most kMaxNgram
  std::uint64_t added_ = 1;  // tokens so far, and one
};

}  // namespace tide

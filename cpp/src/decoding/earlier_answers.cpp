#include "decoding/earlier_answers.h"

#include <algorithm>

namespace tide {
namespace {

constexpr std::size_t kShortest = 2;
constexpr std::size_t kPlaces = 3;  // for the n-grams of each token, of which there are two

}  // namespace

EarlierAnswers::EarlierAnswers(std::size_t bytes)
    : text_(std::max<std::size_t>(bytes / (sizeof(std::int32_t) + kPlaces * sizeof(Following)), 1)),
      follows_(kPlaces * text_.size()) {
  last_.reserve(kMaxNgram);
}

std::size_t EarlierAnswers::place(std::int64_t owner, std::int64_t const* end, std::size_t count) const noexcept {
  std::uint64_t hash = static_cast<std::uint64_t>(owner) ^ count;
  for (std::int64_t const* id = end - count; id != end; ++id) {
    hash = (hash ^ static_cast<std::uint64_t>(*id)) * 0x9E3779B97F4A7C15;
    hash ^= hash >> 29;
  }
  return hash % follows_.size();
}

bool EarlierAnswers::holds(Following const& following, std::int64_t owner, std::int64_t const* end,
                           std::size_t count) const noexcept {
  std::uint64_t const position = following.position;
  if (position == 0 || following.owner != owner || position + text_.size() <= added_ + count) return false;
  for (std::size_t i = 1; i <= count; ++i) {
    if (at(position - i) != end[-static_cast<std::ptrdiff_t>(i)]) return false;
  }
  return true;
}

void EarlierAnswers::add(std::int64_t owner, std::vector<std::int64_t> const& prompt,
                         std::vector<Token> const& answer) noexcept {
  last_.clear();
  for (std::size_t i = prompt.size() - std::min(prompt.size(), kMaxNgram); i < prompt.size(); ++i) add(owner, prompt[i]);
  for (Token const& token : answer) add(owner, token.id);
}

void EarlierAnswers::add(std::int64_t owner, std::int64_t id) noexcept {
  std::int64_t const* const end = last_.data() + last_.size();
  at(added_) = static_cast<std::int32_t>(id);
  for (std::size_t n = kShortest; n <= last_.size(); ++n) {
    Following& following = follows_[place(owner, end, n)];
    bool const agrees = holds(following, owner, end, n) && at(following.position) == id;
    following = {owner, added_, agrees ? following.agreements + 1 : 0};
  }
  ++added_;
  if (last_.size() == kMaxNgram) last_.erase(last_.begin());
  last_.push_back(id);
}

std::optional<PromptLookup::Match> EarlierAnswers::next(std::int64_t owner,
                                                        std::vector<std::int64_t> const& tail) const noexcept {
  std::int64_t const* const end = tail.data() + tail.size();
  for (std::size_t n = std::min(kMaxNgram, tail.size()); n >= kShortest; --n) {
    Following const& following = follows_[place(owner, end, n)];
    if (!holds(following, owner, end, n)) continue;
    return PromptLookup::Match{at(following.position), ngram_source(n, following.agreements)};
  }
  return std::nullopt;
}

}  // namespace tide

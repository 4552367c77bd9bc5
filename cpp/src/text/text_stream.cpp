#include <algorithm>

#include "tide/tokenizer.h"

namespace tide {
namespace {

constexpr std::size_t kContext = 6;  // tokens of the prompt before the first new one, at least
constexpr std::size_t kLongestContext = 16;  // at most: more than kContext only where they begin within a character
constexpr std::size_t kPending = 8;  // tokens whose text may wait for more; a character has 4 bytes at most
constexpr std::size_t kUncertain = 3;  // tokens that more may complete to a character, at most
constexpr char const* kReplacement = "\xEF\xBF\xBD";  // U+FFFD
constexpr std::size_t kReplacementSize = 3;

bool starts_incomplete(std::string const& text) { return text.compare(0, kReplacementSize, kReplacement) == 0; }

// How many U+FFFD `text` ends with.
std::size_t incomplete(std::string const& text) {
  std::size_t count = 0, end = text.size();
  for (; end >= kReplacementSize && text.compare(end - kReplacementSize, kReplacementSize, kReplacement) == 0; ++count) {
    end -= kReplacementSize;
  }
  return count;
}

bool begins_character(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; }

std::ptrdiff_t characters(std::string const& text) { return std::count_if(text.begin(), text.end(), begins_character); }

// `text` without its first `count` characters.
std::string without_first(std::string const& text, std::ptrdiff_t count) {
  auto at = text.begin();
  while (at != text.end() && (count > 0 || !begins_character(*at))) count -= begins_character(*at++) ? 1 : 0;
  return {at, text.end()};
}

}  // namespace

TextStream::TextStream(Detokenizer decode, std::vector<std::int64_t> prompt)
    : decode_(std::move(decode)),
      ids_(std::move(prompt)),
      start_(ids_.size() - std::min(ids_.size(), kContext)),
      shown_(ids_.size()) {
  std::size_t const first = ids_.size() - std::min(ids_.size(), kLongestContext);
  while (start_ > first && starts_incomplete(decoded(start_, shown_))) --start_;
}

std::string TextStream::push(std::int64_t token) {
  ids_.push_back(token);
  std::string text = finish();
  if (!text.empty() && incomplete(text) == 0) {
    start_ = shown_;
    shown_ = ids_.size();
    held_ = 0;
    return text;
  }
  if (ids_.size() - shown_ <= kPending) return "";
  // Special tokens are no text, however many; a space is none at the beginning of a text alone.
  auto const no_text = [&](std::int64_t one) { return decode_({one, one, one}).empty(); };
  ids_.erase(std::remove_if(ids_.begin() + static_cast<std::ptrdiff_t>(shown_), ids_.end(), no_text), ids_.end());
  if (ids_.size() - shown_ <= kPending) return "";
  // A decoder may make all bytes in a row U+FFFD until they end with a character: then the text is shortest.
  std::size_t end = ids_.size() - kUncertain;
  text = until(end);
  for (std::size_t later = end + 1; later <= ids_.size(); ++later) {
    std::string other = until(later);
    if (characters(other) >= characters(text)) continue;
    text = std::move(other);
    end = later;
  }
  start_ = end - kUncertain;
  shown_ = end;
  held_ = std::min(incomplete(text), incomplete(decoded(start_, shown_)));
  text.resize(text.size() - held_ * kReplacementSize);
  return text;
}

std::string TextStream::finish() const { return until(ids_.size()); }

std::string TextStream::until(std::size_t end) const {
  return without_first(decoded(start_, end), characters(decoded(start_, shown_)) - static_cast<std::ptrdiff_t>(held_));
}

std::string TextStream::decoded(std::size_t from, std::size_t to) const {
  auto const at = [&](std::size_t index) { return ids_.begin() + static_cast<std::ptrdiff_t>(index); };
  return decode_({at(from), at(to)});
}

}  // namespace tide

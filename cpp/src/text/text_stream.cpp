#include <algorithm>

#include "tide/tokenizer.h"

namespace tide {
namespace {

constexpr std::size_t kContext = 6;  // tokens of the prompt before the first new one, at least
constexpr char const* kReplacement = "\xEF\xBF\xBD";  // U+FFFD
constexpr std::size_t kReplacementSize = 3;

bool starts_incomplete(std::string const& text) { return text.compare(0, kReplacementSize, kReplacement) == 0; }

bool ends_incomplete(std::string const& text) {
  return text.size() >= kReplacementSize &&
         text.compare(text.size() - kReplacementSize, kReplacementSize, kReplacement) == 0;
}

bool begins_character(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; }

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
  while (start_ > 0 && starts_incomplete(decoded(start_, shown_))) --start_;
}

std::string TextStream::push(std::int64_t token) {
  ids_.push_back(token);
  std::string text = finish();
  if (text.empty() || ends_incomplete(text)) return "";
  start_ = shown_;
  shown_ = ids_.size();
  return text;
}

std::string TextStream::finish() const {
  std::string const before = decoded(start_, shown_);
  return without_first(decoded(start_, ids_.size()), std::count_if(before.begin(), before.end(), begins_character));
}

std::string TextStream::decoded(std::size_t from, std::size_t to) const {
  auto const at = [&](std::size_t index) { return ids_.begin() + static_cast<std::ptrdiff_t>(index); };
  return decode_({at(from), at(to)});
}

}  // namespace tide

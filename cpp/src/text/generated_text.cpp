#include "text/generated_text.h"

#include <algorithm>

#include "generation_error.h"

namespace tide {

bool GeneratedText::push(std::int64_t token, std::string& text) {
  return add(or_generation_error("the detokenizer failed", [&] { return stream_.push(token); }), text);
}

void GeneratedText::finish(std::string& text) {
  add(or_generation_error("the detokenizer failed", [&] { return stream_.finish(); }), text);
}

std::size_t GeneratedText::certain(std::string const& text) const {
  std::size_t held = 0;
  for (std::string const& stop : stop_) {
    for (std::size_t size = std::min(stop.size() - 1, text.size()); size > held; --size) {
      if (text.compare(text.size() - size, size, stop, 0, size) == 0) held = size;
    }
  }
  return text.size() - held;
}

bool GeneratedText::add(std::string const& piece, std::string& text) const {
  std::size_t const before = text.size();
  text += piece;
  std::size_t end = std::string::npos;
  for (std::string const& stop : stop_) {
    end = std::min(end, text.find(stop, before - std::min(before, stop.size() - 1)));
  }
  if (end == std::string::npos) return false;
  text.resize(end);
  return true;
}

}  // namespace tide

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

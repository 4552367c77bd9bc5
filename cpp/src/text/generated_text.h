// Decodes the text of a generation, and ends it at the first stop string.
#pragma once

#include <string>
#include <vector>

#include "tide/tokenizer.h"

namespace tide {

class GeneratedText {
 public:
  GeneratedText(Detokenizer const& decode, std::vector<std::int64_t> const& prompt, std::vector<std::string> stop)
      : stream_(decode, prompt), stop_(std::move(stop)) {}

  // Adds a token's text to the generation's. Returns whether that holds a stop string now; it ends before the first one.
  // Throws GenerationError: the detokenizer threw.
  bool push(std::int64_t token, std::string& text);

  // How much of a text that goes on comes before any stop string, whatever follows: its size without the longest end that is
  // the beginning of one.
  std::size_t certain(std::string const& text) const;

  // Adds what is left when the tokens end. Throws as `push`.
  void finish(std::string& text);

 private:
  bool add(std::string const& piece, std::string& text) const;

  TextStream stream_;
  std::vector<std::string> stop_;
};

}  // namespace tide

// Converts between text and token ids. Needs a library with the C binding of Hugging Face's tokenizers
// (docs/guide/cpp.md), which is opened with the first tokenizer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tide {

// Returns the text (UTF-8) of token ids, without special tokens, and with U+FFFD for bytes of an incomplete character. A
// `Tokenizer` is one; any other function may be given.
using Detokenizer = std::function<std::string(std::vector<std::int64_t> const& ids)>;

// A bundle's tokenizer, opened by `Engine::tokenizer`. Copies share it. May be used by several threads at once.
class Tokenizer {
 public:
  // Internal: the opened library.
  class Library;
  explicit Tokenizer(std::shared_ptr<Library> library) : library_(std::move(library)) {}

  // Returns the token ids of `text`, by default with the special tokens that the model puts around a prompt. Throws
  // GenerationError: the text is not valid UTF-8.
  std::vector<std::int64_t> encode(std::string const& text, bool special_tokens = true) const;

  // Returns the text of token ids, by default without special tokens.
  std::string decode(std::vector<std::int64_t> const& ids, bool special_tokens = false) const;

  std::string operator()(std::vector<std::int64_t> const& ids) const { return decode(ids); }

 private:
  std::shared_ptr<Library> library_;
};

// Converts token ids to text as they arrive. A token may end in the middle of a character, and a tokenizer may spell a
// token differently after another one; so each piece is the difference between two decodings of a short window, and text
// that ends in an incomplete character waits for the next token. The pieces joined are the text that follows the prompt.
class TextStream {
 public:
  // Starts after `prompt`.
  TextStream(Detokenizer decode, std::vector<std::int64_t> prompt);

  // Returns the text that a token completes, often "" in the middle of a character.
  std::string push(std::int64_t token);

  // Returns the remaining text when the tokens end; bytes of an incomplete character become U+FFFD.
  std::string finish() const;

 private:
  // The text of ids_[:end] that was not returned.
  std::string until(std::size_t end) const;
  std::string decoded(std::size_t from, std::size_t to) const;

  Detokenizer decode_;
  std::vector<std::int64_t> ids_;
  // ids_[start_:shown_] were returned, but for their last `held_` characters; they are the context of the next token.
  std::size_t start_, shown_, held_ = 0;
};

}  // namespace tide

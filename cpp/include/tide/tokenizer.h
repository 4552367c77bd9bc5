// Converts between text and token ids. Needs a library with the C binding of Hugging Face's tokenizers, which is opened
// when a tokenizer is: docs/guide/cpp.md says which there are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tide {

// The text (UTF-8) of token ids, without special tokens; bytes that are no complete character as U+FFFD. A `Tokenizer`
// is one, as is any function of a tokenizer of your own.
using Detokenizer = std::function<std::string(std::vector<std::int64_t> const& ids)>;

// A bundle's tokenizer.json, of `Engine::tokenizer`. Copies share it. May be used by several threads at once.
class Tokenizer {
 public:
  // Internal: what runs it.
  class Library;
  explicit Tokenizer(std::shared_ptr<Library> library) : library_(std::move(library)) {}

  // Token ids of `text`, with the special tokens that the model puts around a prompt unless `special_tokens` is false.
  // Throws GenerationError: it is not valid UTF-8.
  std::vector<std::int64_t> encode(std::string const& text, bool special_tokens = true) const;

  // Text of token ids, with special tokens only if `special_tokens`.
  std::string decode(std::vector<std::int64_t> const& ids, bool special_tokens = false) const;

  std::string operator()(std::vector<std::int64_t> const& ids) const { return decode(ids); }

 private:
  std::shared_ptr<Library> library_;
};

// Converts token ids to text as they arrive. A token may end in the middle of a character, and a tokenizer may spell a
// token differently after another one; so each piece is the difference between two decodings of a short window, and text
// that still ends in an incomplete character waits for the next token. The pieces joined are the text after the prompt's.
class TextStream {
 public:
  // Nothing came after `prompt` yet.
  TextStream(Detokenizer decode, std::vector<std::int64_t> prompt);

  // The text that a token completes, often "" in the middle of a character.
  std::string push(std::int64_t token);

  // What is left when the tokens end; bytes of an incomplete character come out as U+FFFD.
  std::string finish() const;

 private:
  std::string decoded(std::size_t from, std::size_t to) const;

  Detokenizer decode_;
  std::vector<std::int64_t> ids_;
  std::size_t start_, shown_;  // ids_[start_:shown_] were returned; they give the context
};

}  // namespace tide

#include "hooks.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <stdexcept>

#include "grammar.h"

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
using Ids = std::vector<std::int64_t>;

std::map<std::string, tide::LogitsProcessor> const kProcessors = {
    // Even and odd tokens by turns.
    {"parity",
     [](Ids const& ids, float* logits, std::size_t vocabulary) {
       for (std::size_t i = (ids.size() + 1) % 2; i < vocabulary; i += 2) logits[i] = kNever;
     }},
    // The latest tokens are less likely.
    {"latest",
     [](Ids const& ids, float* logits, std::size_t) {
       auto const count = static_cast<std::ptrdiff_t>(std::min<std::size_t>(ids.size(), 4));
       for (std::int64_t const id : std::set<std::int64_t>(ids.end() - count, ids.end())) logits[id] -= 0.5f;
     }},
    {"none", [](Ids const&, float* logits, std::size_t vocabulary) { std::fill_n(logits, vocabulary, kNever); }},
    {"throws", [](Ids const&, float*, std::size_t) { throw std::runtime_error("no rule fits\nand more"); }},
};

// A toy tokenizer: every token is a letter or two.
std::string letters(Ids const& ids) {
  std::string text;
  for (std::int64_t const id : ids) text.append(static_cast<std::size_t>(1 + id % 2), static_cast<char>('a' + id % 26));
  return text;
}

// Two tokens are a letter of two bytes; a last one alone is half of it.
std::string halves(Ids const& ids) {
  std::string text;
  for (std::size_t i = 0; i + 1 < ids.size(); i += 2) text += "\xC3\xA9";
  return text + (ids.size() % 2 == 1 ? "\xEF\xBF\xBD" : "");
}

// Takes the option and its value out of the words; "": it is not there.
std::string taken(std::vector<std::string>& words, std::string const& option) {
  auto const at = std::find(words.begin(), words.end(), option);
  if (at == words.end()) return "";
  std::string const value = *(at + 1);
  words.erase(at, at + 2);
  return value;
}

}  // namespace

Options parse_with_hooks(std::vector<std::string> words, tide::Engine const& engine,
                         std::optional<tide::Tokenizer> const& tokenizer) {
  std::string const regex = from_hex(taken(words, "--regex-hex")), folder = taken(words, "--regex-bundle");
  std::string const processor = taken(words, "--processor"), detokenizer = taken(words, "--detokenizer");
  std::vector<std::string> stop;
  for (std::string word; !(word = taken(words, "--stop-hex")).empty();) stop.push_back(from_hex(word));
  Options options = parse(words);
  options.config.stop = stop;
  if (!regex.empty()) {
    std::int64_t const end = engine.manifest().model.eos_token_ids.at(0);
    options.config.logits_processor = regex_of(regex, folder, end, options.prompts.at(0).size());
  }
  if (detokenizer == "bundle") options.config.detokenizer = tokenizer.value();
  if (detokenizer == "letters") options.config.detokenizer = letters;
  if (detokenizer == "halves") options.config.detokenizer = halves;
  if (detokenizer == "throws") {
    options.config.detokenizer = [](Ids const&) -> std::string { throw std::runtime_error("no"); };
  }
  if (!processor.empty()) options.config.logits_processor = kProcessors.at(processor);
  return options;
}

std::string from_hex(std::string const& word) {
  std::string text;
  for (std::size_t i = 0; i + 1 < word.size(); i += 2) {
    text.push_back(static_cast<char>(std::stoi(word.substr(i, 2), nullptr, 16)));
  }
  return text;
}

#include "grammar.h"

#include <dlfcn.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>

// Of llguidance.h.
namespace llguidance {

struct Tokenizer;
struct Matcher;

struct TokenizerInit {
  std::uint32_t vocabulary;
  std::uint32_t end;
  std::uint32_t const* token_lengths;
  std::uint8_t const* token_bytes;
  char const* tokenizer_json;
  bool assumes_string;
  std::size_t (*tokenize)(void const*, std::uint8_t const*, std::size_t, std::uint32_t*, std::size_t);
  bool greedy;
  void const* user_data;
  char const* const* slices;
};

struct Init {
  Tokenizer const* tokenizer;
  std::uint64_t rest[16];  // what llg_constraint_init_set_defaults fills
};

struct Api {
  Api() : library_(dlopen(std::getenv("TIDE_TOKENIZERS"), RTLD_LAZY | RTLD_LOCAL)) {
    load(new_tokenizer, "llg_new_tokenizer");
    load(set_defaults, "llg_constraint_init_set_defaults");
    load(new_matcher, "llg_new_matcher");
    load(error, "llg_matcher_get_error");
    load(reset, "llg_matcher_reset");
    load(consume, "llg_matcher_consume_tokens");
    load(compute, "llg_matcher_compute_mask");
    load(mask, "llg_matcher_get_mask");
    load(free_matcher, "llg_free_matcher");
    load(free_tokenizer, "llg_free_tokenizer");
  }

  Tokenizer* (*new_tokenizer)(TokenizerInit const*, char*, std::size_t);
  void (*set_defaults)(Init*, Tokenizer const*);
  Matcher* (*new_matcher)(Init const*, char const*, char const*);
  char const* (*error)(Matcher*);
  std::int32_t (*reset)(Matcher*);
  std::int32_t (*consume)(Matcher*, std::uint32_t const*, std::size_t);
  std::int32_t (*compute)(Matcher*);
  std::uint32_t const* (*mask)(Matcher*);
  void (*free_matcher)(Matcher*);
  void (*free_tokenizer)(Tokenizer*);

 private:
  template <typename F>
  void load(F*& function, char const* name) {
    function = reinterpret_cast<F*>(dlsym(library_, name));
    if (function == nullptr) throw std::runtime_error(name);
  }

  void* library_;
};

}  // namespace llguidance

tide::LogitsProcessor regex_of(std::string const& regex, std::string const& bundle, std::int64_t end,
                               std::size_t prompt) {
  auto const api = std::make_shared<llguidance::Api>();
  std::ifstream file(bundle + "/tokenizer.json");
  std::string const json(std::istreambuf_iterator<char>(file), {});
  char reason[256] = "";
  llguidance::TokenizerInit tokenizer{};
  tokenizer.end = static_cast<std::uint32_t>(end);
  tokenizer.tokenizer_json = json.c_str();
  tokenizer.greedy = true;
  std::shared_ptr<llguidance::Tokenizer> const opened(api->new_tokenizer(&tokenizer, reason, sizeof reason),
                                                      [api](auto* one) { if (one != nullptr) api->free_tokenizer(one); });
  if (opened == nullptr) throw std::runtime_error(reason);
  llguidance::Init init{};
  init.tokenizer = opened.get();
  api->set_defaults(&init, init.tokenizer);
  std::shared_ptr<llguidance::Matcher> const owner(api->new_matcher(&init, "regex", regex.c_str()),
                                                   [api, opened](auto* one) { api->free_matcher(one); });
  if (char const* const error = api->error(owner.get())) throw std::runtime_error(error);
  return [api, owner, prompt](std::vector<std::int64_t> const& ids, float* logits, std::size_t vocabulary) {
    llguidance::Matcher* const matcher = owner.get();
    std::vector<std::uint32_t> const made(ids.begin() + static_cast<std::ptrdiff_t>(prompt), ids.end());
    api->reset(matcher);  // drafts may have been rejected since
    api->consume(matcher, made.data(), made.size());
    if (api->compute(matcher) != 0) throw std::runtime_error(api->error(matcher));
    std::uint32_t const* const mask = api->mask(matcher);
    for (std::size_t id = 0; id < vocabulary; ++id) {
      if ((mask[id / 32] >> id % 32 & 1) == 0) logits[id] = -INFINITY;
    }
  };
}

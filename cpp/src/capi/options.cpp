#include "capi/options.h"

#include <charconv>
#include <map>

#include "bundle/fields.h"

namespace tide {
namespace {

using Setters = std::map<std::string, std::function<void(Field const&)>>;

// Sets what `text` has; null is as if it were not there. Error: what a wrong option throws.
template <typename Error>
void set_options(char const* text, Setters const& setters) {
  if (text == nullptr) return;
  std::optional<Json> const json = parse_json(text);
  if (!json) throw Error("the options are not valid JSON");
  try {
    for (auto const& [name, field] : Field(*json, "options", "").entries()) {
      auto const setter = setters.find(name);
      if (setter == setters.end()) field.refuse("is unknown");
      if (!field.is_null()) setter->second(field);
    }
  } catch (BundleError const& error) {  // of `Field`
    throw Error(error.what());
  }
}

// One value for all of something, or one for each.
template <typename T>
OneOrEach<T> one_or_each(Field const& field, T (Field::*one)() const, std::vector<T> (Field::*each)() const) {
  return field.is_list() ? OneOrEach<T>((field.*each)()) : OneOrEach<T>((field.*one)());
}

// Biases by token id, whose digits are a field's name.
std::map<std::int64_t, double> biases(Field const& field) {
  std::map<std::int64_t, double> values;
  for (auto const& [name, value] : field.entries()) {
    std::int64_t id = 0;
    auto const end = std::from_chars(name.data(), name.data() + name.size(), id);
    if (name.empty() || end.ec != std::errc() || end.ptr != name.data() + name.size()) value.refuse("is no token id");
    values[id] = value.real();
  }
  return values;
}

}  // namespace

OpenOptions open_options(char const* text) {
  OpenOptions options;
  set_options<ConfigError>(text, {
      {"provider", [&](Field const& field) { options.load.provider = field.text(); }},
      {"threads", [&](Field const& field) { options.load.threads = field.whole(); }},
      {"verify", [&](Field const& field) { options.load.verify = field.boolean(); }},
      {"plugins", [&](Field const& field) { options.load.plugins = field.text(); }},
      {"device", [&](Field const& field) { options.load.device = field.whole(); }},
      {"tokenizers", [&](Field const& field) { options.tokenizers = field.text(); }},
  });
  return options;
}

GenerationConfig generation_config(char const* text, std::function<Tokenizer()> const& tokenizer) {
  GenerationConfig config;
  bool detokenize = false;
  set_options<GenerationError>(text, {
      {"max_new_tokens", [&](Field const& field) { config.max_new_tokens = field.whole(); }},
      {"mode", [&](Field const& field) { config.mode = mode_of(field.text()); }},
      {"threshold", [&](Field const& field) { config.threshold = one_or_each(field, &Field::real, &Field::reals); }},
      {"min_layers", [&](Field const& field) { config.min_layers = field.whole(); }},
      {"max_pending", [&](Field const& field) { config.max_pending = field.whole(); }},
      {"prompt_lookup", [&](Field const& field) { config.prompt_lookup = field.whole(); }},
      {"temperature", [&](Field const& field) { config.temperature = field.real(); }},
      {"top_k", [&](Field const& field) { config.top_k = field.whole(); }},
      {"top_p", [&](Field const& field) { config.top_p = field.real(); }},
      {"min_p", [&](Field const& field) { config.min_p = field.real(); }},
      {"repetition_penalty", [&](Field const& field) { config.repetition_penalty = field.real(); }},
      {"presence_penalty", [&](Field const& field) { config.presence_penalty = field.real(); }},
      {"frequency_penalty", [&](Field const& field) { config.frequency_penalty = field.real(); }},
      {"logit_bias", [&](Field const& field) { config.logit_bias = biases(field); }},
      {"logprobs", [&](Field const& field) { config.logprobs = field.whole(); }},
      {"seed", [&](Field const& field) { config.seed = one_or_each(field, &Field::whole, &Field::wholes); }},
      {"stop_token_ids", [&](Field const& field) { config.stop_token_ids = field.wholes(); }},
      {"stop", [&](Field const& field) { config.stop = field.is_list() ? field.texts() : std::vector{field.text()}; }},
      {"detokenize", [&](Field const& field) { detokenize = field.boolean(); }},
      {"compaction_threshold", [&](Field const& field) { config.compaction_threshold = field.real(); }},
  });
  if (detokenize || !config.stop.empty()) config.detokenizer = tokenizer();
  return config;
}

SchedulerLimits scheduler_limits(char const* text) {
  SchedulerLimits limits;
  set_options<GenerationError>(text, {
      {"slots", [&](Field const& field) { limits.slots = field.whole(); }},
      {"prompt_tokens", [&](Field const& field) { limits.prompt_tokens = field.whole(); }},
      {"waiting", [&](Field const& field) { limits.waiting = field.whole(); }},
      {"kv_tokens", [&](Field const& field) { limits.kv_tokens = field.whole(); }},
      {"prefix_cache_bytes", [&](Field const& field) { limits.prefix_cache_bytes = field.whole(); }},
  });
  return limits;
}

}  // namespace tide

#include "capi/options.h"

#include <charconv>
#include <map>

#include "bundle/fields.h"
#include "formatting.h"

namespace tide {
namespace {

using Setters = std::map<std::string, std::function<void(Field const&)>>;

// Sets what `text` has; null is as if it were not there. Error: what a wrong option throws.
template <typename Error>
void set_options(char const* text, Setters const& setters) {
  if (text == nullptr) return;
  std::optional<Json> const json = Json::parse(text);
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

// As a manifest has it.
Drafting given_drafting(Field const& field) {
  field.object({"thresholds", "max_drafts", "prompt_lookup", "draft_costs", "verify_costs", "drafter_cost", "max_learned"},
               {"drafter_cost", "max_learned"});
  Drafting drafting{field["thresholds"].reals(), field["max_drafts"].whole(), field["prompt_lookup"].whole(),
                    field["draft_costs"].reals(), field["verify_costs"].reals()};
  if (field.has("drafter_cost")) drafting.drafter_cost = field["drafter_cost"].real();
  if (field.has("max_learned")) drafting.max_learned = field["max_learned"].whole();
  return drafting;
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
      {"onnxruntime", [&](Field const& field) { options.load.onnxruntime = field.text(); }},
      {"adapters", [&](Field const& field) {
         for (auto const& [name, folder] : field.entries()) options.load.adapters[name] = folder.text();
       }},
      {"graphs", [&](Field const& field) { options.load.graphs = field.text(); }},
      {"tokenizers", [&](Field const& field) { options.tokenizers = field.text(); }},
  });
  return options;
}

GenerationConfig generation_config(char const* text, std::function<Detokenizer()> const& detokenizer) {
  GenerationConfig config;
  bool detokenize = false;
  set_options<GenerationError>(text, {
      {"max_new_tokens", [&](Field const& field) { config.max_new_tokens = field.whole(); }},
      {"mode", [&](Field const& field) { config.mode = mode_of(field.text()); }},
      {"threshold", [&](Field const& field) { config.threshold = one_or_each(field, &Field::real, &Field::reals); }},
      {"min_layers", [&](Field const& field) { config.min_layers = field.whole(); }},
      {"max_pending", [&](Field const& field) { config.max_pending = field.whole(); }},
      {"prompt_lookup", [&](Field const& field) { config.prompt_lookup = field.whole(); }},
      {"drafter", [&](Field const& field) { config.drafter = field.whole(); }},
      {"adapter", [&](Field const& field) { config.adapter = field.text(); }},
      {"cache_salt", [&](Field const& field) { config.cache_salt = field.text(); }},
      {"states", [&](Field const& field) { config.states = field.boolean(); }},
      {"temperature", [&](Field const& field) { config.temperature = field.real(); }},
      {"top_k", [&](Field const& field) { config.top_k = field.whole(); }},
      {"top_p", [&](Field const& field) { config.top_p = field.real(); }},
      {"min_p", [&](Field const& field) { config.min_p = field.real(); }},
      {"repetition_penalty", [&](Field const& field) { config.repetition_penalty = field.real(); }},
      {"presence_penalty", [&](Field const& field) { config.presence_penalty = field.real(); }},
      {"frequency_penalty", [&](Field const& field) { config.frequency_penalty = field.real(); }},
      {"logit_bias", [&](Field const& field) { config.logit_bias = biases(field); }},
      {"logprobs", [&](Field const& field) { config.logprobs = field.whole(); }},
      {"prompt_logprobs", [&](Field const& field) { config.prompt_logprobs = field.whole(); }},
      {"seed", [&](Field const& field) { config.seed = one_or_each(field, &Field::whole, &Field::wholes); }},
      {"stop_token_ids", [&](Field const& field) { config.stop_token_ids = field.wholes(); }},
      {"stop", [&](Field const& field) { config.stop = field.is_list() ? field.texts() : std::vector{field.text()}; }},
      {"drafting", [&](Field const& field) { config.drafting = given_drafting(field); }},
      {"detokenize", [&](Field const& field) { detokenize = field.boolean(); }},
      {"compaction_threshold", [&](Field const& field) { config.compaction_threshold = field.real(); }},
  });
  if (detokenize || !config.stop.empty()) config.detokenizer = detokenizer();
  return config;
}

std::pair<SchedulerLimits, std::optional<AuditConfig>> scheduler_options(char const* text) {
  SchedulerLimits limits;
  std::optional<AuditConfig> audit;
  auto const audits = [&]() -> AuditConfig& { return audit ? *audit : audit.emplace(); };
  set_options<GenerationError>(text, {
      {"slots", [&](Field const& field) { limits.slots = field.whole(); }},
      {"prompt_tokens", [&](Field const& field) { limits.prompt_tokens = field.whole(); }},
      {"waiting", [&](Field const& field) { limits.waiting = field.whole(); }},
      {"kv_tokens", [&](Field const& field) { limits.kv_tokens = field.whole(); }},
      {"prefix_cache_bytes", [&](Field const& field) { limits.prefix_cache_bytes = field.whole(); }},
      {"compaction_threshold", [&](Field const& field) { limits.compaction_threshold = field.real(); }},
      {"audit_rate", [&](Field const& field) { audits().rate = field.real(); }},
      {"audit_epsilon", [&](Field const& field) { audits().epsilon = field.real(); }},
  });
  return {limits, audit};
}

Drafting drafting_options(char const* text) {
  std::optional<Json> const json = Json::parse(text);
  if (!json) throw GenerationError("the drafting is not valid JSON");
  return given_drafting(Field(*json, "drafting", ""));
}

std::string json_of(Engine const& engine, GenerationConfig const& config) {
  auto const list = [](std::vector<double> const& values) {
    std::string text;
    for (double const value : values) text += (text.empty() ? "" : ", ") + shown(value);
    return "[" + text + "]";
  };
  bool const drafts = config.mode == Mode::lossless;
  std::string drafting = "null";
  if (drafts) {
    Drafting const used = config.drafting.value_or(engine.drafting());
    drafting = "{\"max_drafts\": " + std::to_string(config.max_pending.value_or(used.max_drafts)) +
               ", \"prompt_lookup\": " + std::to_string(config.prompt_lookup.value_or(used.prompt_lookup)) +
               ", \"drafter\": " +
               std::to_string(engine.manifest().drafter ? config.drafter.value_or(DraftLimits(used).drafter) : 0) +
               ", \"draft_costs\": " + list(used.draft_costs) + ", \"verify_costs\": " + list(used.verify_costs) + "}";
  }
  std::int64_t const pending = drafts ? -1 : config.max_pending.value_or(engine.manifest().max_pending);
  return "{\"mode\": \"" + std::string(name_of(config.mode)) +
         "\", \"thresholds\": " + list(resolve_thresholds(engine.manifest(), config)) +
         ", \"max_pending\": " + std::to_string(pending) + ", \"drafting\": " + drafting +
         ", \"compaction_threshold\": " +
         (config.compaction_threshold ? shown(*config.compaction_threshold) : "null") + "}";
}

}  // namespace tide

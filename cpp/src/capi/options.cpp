#include "capi/options.h"

#include <charconv>
#include <limits>
#include <map>

#include "bundle/fields.h"
#include "bundle/mode_fields.h"
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

void read_option(Field const& field, std::int64_t& value) { value = field.whole(); }
void read_option(Field const& field, double& value) { value = field.real(); }
void read_option(Field const& field, bool& value) { value = field.boolean(); }
void read_option(Field const& field, std::string& value) { value = field.text(); }
void read_option(Field const& field, Mode& value) { value = mode_of(field.text()); }
void read_option(Field const& field, std::vector<std::int64_t>& values) { values = field.wholes(); }
void read_option(Field const& field, std::vector<std::string>& values) {
  values = field.is_list() ? field.texts() : std::vector{field.text()};
}

// Biases by token id, whose digits are a field's name.
void read_option(Field const& field, LogitBias& values) {
  for (auto const& [name, value] : field.entries()) {
    std::int64_t id = 0;
    auto const end = std::from_chars(name.data(), name.data() + name.size(), id);
    if (name.empty() || end.ec != std::errc() || end.ptr != name.data() + name.size()) value.refuse("is no token id");
    values[id] = value.real();
  }
}

template <typename T>
void read_option(Field const& field, std::optional<T>& value) {
  read_option(field, value.emplace());
}
void read_option(Field const& field, std::optional<Threshold>& value) {
  value = field.is_list() ? Threshold(field.reals()) : Threshold(field.real());
}
void read_option(Field const& field, std::optional<Seed>& value) {
  value = field.is_list() ? Seed(field.wholes()) : Seed(field.whole());
}

int descriptor_in(Field const& field) {
  std::int64_t const number = field.whole(0);
  field.require(number <= std::numeric_limits<int>::max(), "is no descriptor");
  return static_cast<int>(number);
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
      {"opened", [&](Field const& field) {
         OpenedFiles& opened = options.load.opened.emplace();
         opened.manifest = field["manifest"].text();
         for (auto const& [name, descriptor] : field["files"].entries()) opened.files[name] = descriptor_in(descriptor);
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
#define TIDE_OPTION(type, name, standard, limits, counts, help) \
  {#name, [&](Field const& field) { read_option(field, config.name); }},
#include "tide/options.inc"
      {"drafting", [&](Field const& field) { config.drafting = drafting_in(field); }},
      {"detokenize", [&](Field const& field) { detokenize = field.boolean(); }},
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
      {"answer_bytes", [&](Field const& field) { limits.answer_bytes = field.whole(); }},
      {"compaction_threshold", [&](Field const& field) { limits.compaction_threshold = field.real(); }},
      {"audit_rate", [&](Field const& field) { audits().rate = field.real(); }},
      {"audit_epsilon", [&](Field const& field) { audits().epsilon = field.real(); }},
  });
  return {limits, audit};
}

Drafting drafting_options(char const* text) {
  std::optional<Json> const json = Json::parse(text);
  if (!json) throw GenerationError("the drafting is not valid JSON");
  return drafting_in(Field(*json, "drafting", ""));
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
    Drafting const used = engine.drafting(config);
    drafting = "{\"max_drafts\": " + std::to_string(used.max_drafts) +
               ", \"prompt_lookup\": " + std::to_string(used.prompt_lookup) +
               ", \"drafter\": " + std::to_string(*used.max_learned) + ", \"costs\": \"" + used.costs_source +
               "\", \"draft_costs\": " + list(used.draft_costs) + ", \"verify_costs\": " + list(used.verify_costs) +
               ", \"drafter_cost\": " + shown(*used.drafter_cost) + "}";
  }
  std::int64_t const pending = drafts ? -1 : config.max_pending.value_or(engine.manifest().max_pending);
  return "{\"mode\": \"" + std::string(name_of(config.mode)) +
         "\", \"thresholds\": " + list(resolve_thresholds(engine.manifest(), config)) +
         ", \"max_pending\": " + std::to_string(pending) + ", \"drafting\": " + drafting +
         ", \"compaction_threshold\": " +
         (config.compaction_threshold ? shown(*config.compaction_threshold) : "null") + "}";
}

}  // namespace tide

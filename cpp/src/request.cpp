#include "request.h"

#include <cmath>
#include <limits>
#include <sstream>
#include <utility>

#include "bundle/sha256.h"
#include "formatting.h"
#include "sequence.h"

namespace tide {
namespace {

// The numbers that an option may be: from `low` on, or only above it, to `high`.
struct Limits {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool above = false;
};
constexpr Limits unlimited;
constexpr Limits at_least(double low) { return {low}; }
constexpr Limits within(double low, double high) { return {low, high}; }
constexpr Limits above(double low, double high = Limits().high) { return {low, high, true}; }

void check_limits(char const* name, std::int64_t value, Limits const& limits) {
  whole_number(name, value, static_cast<std::int64_t>(limits.low));
}

void check_limits(char const* name, double value, Limits const& limits) {
  real_number(name, value);
  if ((limits.above ? limits.low < value : limits.low <= value) && value <= limits.high) return;
  std::ostringstream rule;
  if (limits.above) {
    rule << "be above " << limits.low;
    if (std::isfinite(limits.high)) rule << " and at most " << limits.high;
  } else if (std::isfinite(limits.high)) {
    rule << "lie in [" << limits.low << ", " << limits.high << "]";
  } else {
    rule << "be " << limits.low << " or more";
  }
  throw GenerationError(std::string(name) + " must " + rule.str() + ", not " + shown(value));
}

void check_limits(char const* name, Seed const& seeds, Limits const& limits) {
  for (std::int64_t const seed : seeds.values()) check_limits(name, seed, limits);
}

// What is no number; and thresholds, which `resolve_thresholds` checks with the bundle's.
template <typename T>
void check_limits(char const*, T const&, Limits const&) {}

template <typename T>
void check_limits(char const* name, std::optional<T> const& value, Limits const& limits) {
  if (value) check_limits(name, *value, limits);
}

// Where an option has an effect.
enum class Counts {
  everywhere,
  drawn,        // with a temperature
  exits,        // in modes exit and lossless, with checkpoints
  lists,        // as exits, of a list of prompts
  lossless,     // in this mode
  not_lossless  // in others
};

// Throws if an option, which is set, has no effect. batched: for a list of prompts.
void check_effect(std::string const& name, Counts counts, Bundle const& bundle, GenerationConfig const& config, bool batched) {
  bool const greedy = config.temperature == 0, drafts = config.mode == Mode::lossless;
  std::string const mode = "'" + std::string(name_of(config.mode)) + "'";
  if (counts == Counts::drawn && greedy) {
    throw GenerationError(name + " is for a temperature above 0: without one the most likely token is taken");
  }
  if (counts == Counts::lists && !batched) {
    throw GenerationError(name + " is for a list of prompts: one prompt has nothing to be kept apart from");
  }
  if (counts == Counts::exits || counts == Counts::lists) {
    if (config.mode == Mode::full) {
      throw GenerationError(name + " is for modes 'exit' and 'lossless', not " + mode + ", where no token leaves early");
    }
    if (bundle.manifest.checkpoints.empty()) {
      throw GenerationError(name + " is for checkpoints, and bundle " + bundle.path.string() +
                            " has none: no token leaves early");
    }
  }
  if (counts == Counts::lossless && !drafts) {
    throw GenerationError(name + " is for mode 'lossless', not " + mode + ": elsewhere nothing is drafted");
  }
  if (counts == Counts::not_lossless && drafts) {
    throw GenerationError(name + " is for modes 'full' and 'exit', not " + mode + ", whose drafts' hidden states are not kept");
  }
}

template <typename T>
bool differs(T const& value, T const& other) {
  return value != other;
}

template <typename T>
bool differs(std::optional<T> const& value, std::optional<T> const&) {
  return value.has_value();
}

// Throws if an option that is set has no effect.
void check_effects(Bundle const& bundle, GenerationConfig const& config, bool batched) {
  GenerationConfig const defaults;
#define TIDE_OPTION(type, name, standard, limits, counts, help) \
  if (differs(config.name, defaults.name)) check_effect(#name, Counts::counts, bundle, config, batched);
#include "tide/options.inc"
  if (config.drafter.value_or(0) > 0 && !bundle.manifest.drafter) {
    throw GenerationError("drafter is for a bundle with a drafter, and bundle " + bundle.path.string() +
                          " has none: train one with tide-export draft, or omit it");
  }
}

// The compaction threshold of a list of prompts.
double compaction_share(Manifest const& manifest, GenerationConfig const& config) {
  // In lossless mode pending tokens are drafts, all of which must go through every layer.
  return config.compaction_threshold.value_or(config.mode == Mode::lossless ? 0 : manifest.compaction_threshold);
}

// The seed of a prompt that is not in a list; none: a random one.
std::optional<std::int64_t> single_seed(GenerationConfig const& config) {
  if (!config.seed) return std::nullopt;
  if (config.seed->for_all()) return config.seed->values()[0];
  throw GenerationError("seed must be a whole number, 0 or more, not [" + joined(config.seed->values(), ", ") + "]");
}

// One seed per prompt of a list.
std::vector<std::optional<std::int64_t>> seeds_of(GenerationConfig const& config, std::size_t prompts) {
  if (!config.seed) return std::vector<std::optional<std::int64_t>>(prompts);
  std::vector<std::int64_t> const seeds = config.seed->values(prompts);
  if (seeds.size() == prompts) return {seeds.begin(), seeds.end()};
  throw GenerationError("there are " + std::to_string(seeds.size()) + " seeds for " + std::to_string(prompts) +
                        " prompts: give one for each, or one for all");
}

// Throws if logit_bias, logprobs or prompt_logprobs does not fit the vocabulary.
void check_logits(Manifest const& manifest, GenerationConfig const& config) {
  std::vector<std::int64_t> biased;
  for (auto const& [id, bias] : config.logit_bias) biased.push_back(id);
  check_vocabulary(manifest, biased, "logit_bias");
  std::pair<char const*, std::optional<std::int64_t>> const counts[] = {{"logprobs", config.logprobs},
                                                                        {"prompt_logprobs", config.prompt_logprobs}};
  for (auto const& [name, count] : counts) {
    if (!count || *count <= manifest.model.vocab_size) continue;
    throw GenerationError(std::string(name) + " must be a whole number from 0 to " +
                          std::to_string(manifest.model.vocab_size) + ", not " + std::to_string(*count));
  }
}

// The tokens that end a generation.
std::set<std::int64_t> stop_ids(Manifest const& manifest, GenerationConfig const& config) {
  if (config.stop_token_ids) check_vocabulary(manifest, *config.stop_token_ids, "stop_token_ids");
  auto const& ids = config.stop_token_ids ? *config.stop_token_ids : manifest.model.eos_token_ids;
  return {ids.begin(), ids.end()};
}

// The tokens to draft from.
std::vector<std::int64_t> predicted(Manifest const& manifest, GenerationConfig const& config) {
  if (!config.prediction) return {};
  check_vocabulary(manifest, *config.prediction, "prediction");
  std::int64_t const context = context_of(manifest);
  if (static_cast<std::int64_t>(config.prediction->size()) <= context) return *config.prediction;
  throw GenerationError("prediction has " + std::to_string(config.prediction->size()) + " tokens, more than the context of " +
                        std::to_string(context) + ": give the part that the answer may repeat");
}

// The strings that end a generation.
std::vector<std::string> stop_strings(GenerationConfig const& config) {
  std::string shown;
  bool empty = false;
  for (std::string const& text : config.stop) {
    shown += (shown.empty() ? "'" : ", '") + text + "'";
    empty = empty || text.empty();
  }
  if (empty) {
    throw GenerationError("stop must be a string or a list of strings, none of them empty, not [" + shown + "]");
  }
  if (config.stop.empty() || config.detokenizer) return config.stop;
  throw GenerationError("stop needs a tokenizer: give one as GenerationConfig::detokenizer (Engine::tokenizer)");
}

// A number that only those who know the salt can find, and that is no negative number of an adapter.
std::int64_t salted(std::string const& salt, std::int64_t adapter) {
  constexpr std::size_t kDigits = 15;  // hexadecimal: 60 bits
  std::string const digest = sha256_of(std::to_string(adapter) + ":" + salt);
  return -(std::int64_t{1} << 61) - std::stoll(digest.substr(0, kDigits), nullptr, 16);
}

}  // namespace

Request::Request(Backend& backend, GenerationConfig const& config, std::optional<std::size_t> prompts)
    : mode(within_limits(config).mode),
      max_new_tokens(config.max_new_tokens),
      thresholds(resolve_thresholds(backend.manifest(), config)),
      drafts(draft_limits(backend, config)),
      max_pending(drafts ? kNoLimit : pending_limit(backend.manifest(), config.max_pending)),
      adapter(adapter_of(backend, config.adapter)),
      cache_root(config.cache_salt ? salted(*config.cache_salt, adapter) : -adapter) {
  Bundle const& bundle = backend.bundle();
  auto const seeds = prompts ? seeds_of(config, *prompts) : std::vector{single_seed(config)};
  for (std::optional<std::int64_t> const seed : seeds) samplers.emplace_back(config, seed);
  check_effects(bundle, config, prompts.has_value());
  stop_token_ids = stop_ids(bundle.manifest, config);
  check_logits(bundle.manifest, config);
  prediction = predicted(bundle.manifest, config);
  stop = stop_strings(config);
  detokenizer = config.detokenizer;
  states = config.states;
  if (config.prompt_logprobs) prompt_logprobs = static_cast<std::size_t>(*config.prompt_logprobs);
  if (prompts) compaction_threshold = compaction_share(bundle.manifest, config);
}

Drafting drafting_of(Manifest const& manifest, GenerationConfig const& config) {
  if (!config.drafting) return manifest.drafting.value_or(default_drafting(manifest));
  check_drafting(*config.drafting, manifest.checkpoints.size());
  if (config.drafting->thresholds.size() == manifest.checkpoints.size()) return *config.drafting;
  throw GenerationError("drafting.thresholds must have one value per checkpoint");
}

std::optional<DraftLimits> draft_limits(Backend& backend, GenerationConfig const& config) {
  if (config.mode != Mode::lossless) return std::nullopt;
  Manifest const& manifest = backend.manifest();
  Drafting const drafting = drafting_of(manifest, config);
  DraftLimits limits(drafting);
  limits.max_drafts = config.max_pending.value_or(limits.max_drafts);
  limits.prompt_lookup = config.prompt_lookup.value_or(limits.prompt_lookup);
  limits.drafter = config.drafter.value_or(limits.drafter);
  limits.thresholds = resolve_thresholds(manifest, config);
  limits.undo(manifest.model.undo());
  MeasuredCosts::Found found{assumed_costs(manifest), limits.costs_source};
  if (!drafting.verify_costs.empty()) {
    found = {given_costs(drafting), "given"};
  } else if (limits.may_draft(manifest.drafter.has_value())) {
    found = backend.costs().now(backend);
  }
  limits.costs = std::move(found.costs);
  limits.costs_source = found.source;
  return limits;
}

GenerationConfig without_auto(Bundle const& bundle, GenerationConfig config, std::optional<AutoMode> const& measured,
                              bool batched) {
  if (config.mode != Mode::automatic) return config;
  check_effects(bundle, within_limits(config), batched);
  if (config.threshold || config.min_layers) {
    config.mode = Mode::exit;
  } else if (!measured || measured->mode == "full") {
    config.mode = Mode::full;
    config.max_pending.reset();
    config.compaction_threshold.reset();
  } else if (measured->mode == "lossless") {
    config.mode = Mode::lossless;
    config.compaction_threshold.reset();
  } else {
    config.mode = Mode::exit;
    config.threshold = measured->thresholds;
    config.min_layers = 0;
  }
  return config;
}

std::int64_t adapter_of(Backend const& backend, std::optional<std::string> const& name) {
  std::int64_t const adapter = name ? backend.adapter(*name) : 0;
  if (name && adapter == 0) {
    throw GenerationError("adapter '" + *name + "' is none of those that the bundle was loaded with");
  }
  return adapter;
}

std::int64_t whole_number(char const* name, std::int64_t value, std::int64_t minimum) {
  if (value >= minimum) return value;
  throw GenerationError(std::string(name) + " must be a whole number, " + std::to_string(minimum) + " or more, not " +
                        std::to_string(value));
}

double real_number(char const* name, double value) {
  if (std::isfinite(value)) return value;
  throw GenerationError(std::string(name) + " must be a number, not " + shown(value));
}

double number_within(char const* name, double value, int low, int high) {
  check_limits(name, value, within(low, high));
  return value;
}

GenerationConfig const& within_limits(GenerationConfig const& config) {
#define TIDE_OPTION(type, name, standard, limits, counts, help) check_limits(#name, config.name, limits);
#include "tide/options.inc"
  return config;
}

std::string_view name_of(Mode mode) {
  constexpr std::string_view names[] = {"auto", "full", "exit", "lossless"};
  return names[static_cast<std::size_t>(mode)];
}

Mode mode_of(std::string_view name) {
  if (name == "auto") return Mode::automatic;
  if (name == "full") return Mode::full;
  if (name == "exit") return Mode::exit;
  if (name == "lossless") return Mode::lossless;
  throw GenerationError("mode must be 'auto', 'full', 'exit' or 'lossless', not '" + std::string(name) + "'");
}

std::vector<double> resolve_thresholds(Manifest const& manifest, GenerationConfig const& config) {
  bool const lossless = config.mode == Mode::lossless;
  std::vector<std::int64_t> const& points = manifest.checkpoints;
  // min_layers guards the quality of exits; drafts are verified.
  std::int64_t const min_layers =
      config.min_layers ? whole_number("min_layers", *config.min_layers, 0) : (lossless ? 0 : manifest.min_layers);
  std::vector<double> values =
      lossless ? drafting_of(manifest, config).thresholds : manifest.thresholds;
  if (config.threshold) values = config.threshold->values(points.size());
  if (values.size() != points.size()) {
    throw GenerationError("threshold has " + std::to_string(values.size()) + " values but the model has " +
                          std::to_string(points.size()) + " checkpoints (" + joined(points, ", ") +
                          "): give one value, or one per checkpoint");
  }
  for (double const value : values) {
    if (!(0 <= value && value <= 1)) throw GenerationError("threshold must lie in [0, 1], not " + shown(value));
  }
  for (std::size_t k = 0; k < points.size(); ++k) {
    // Where no score exits, none is computed.
    if (config.mode == Mode::full || points[k] < min_layers || values[k] >= 1) values[k] = kNeverExit;
  }
  return values;
}

void check_thresholds(Manifest const& manifest, std::vector<double> const& thresholds) {
  if (thresholds.size() != manifest.checkpoints.size()) {
    throw GenerationError(std::to_string(thresholds.size()) + " thresholds for " +
                          std::to_string(manifest.checkpoints.size()) + " checkpoints");
  }
  for (double const value : thresholds) real_number("a threshold", value);
}

void check_vocabulary(Manifest const& manifest, std::vector<std::int64_t> const& ids, std::string const& name) {
  for (std::int64_t const id : ids) {
    if (id >= 0 && id < manifest.model.vocab_size) continue;
    throw GenerationError(name + " holds token id " + std::to_string(id) + ", outside the vocabulary 0.." +
                          std::to_string(manifest.model.vocab_size - 1));
  }
}

void check_prompt(Manifest const& manifest, std::vector<std::int64_t> const& prompt, std::string const& name) {
  if (prompt.empty()) throw GenerationError(name + " is empty: give at least one token");
  check_vocabulary(manifest, prompt, name);
  auto const& context = manifest.model.context_length;
  if (context && static_cast<std::int64_t>(prompt.size()) > *context) {
    throw GenerationError(name + " has " + std::to_string(prompt.size()) + " tokens but the model's context holds " +
                          std::to_string(*context));
  }
}

std::int64_t context_of(Manifest const& manifest) {
  return manifest.model.context_length.value_or(std::numeric_limits<std::int32_t>::max());
}

std::int64_t length_after(std::int64_t length, std::size_t count, std::int64_t limit) {
  if (count == 0) throw GenerationError("a step needs at least one token");
  std::int64_t const total = length + static_cast<std::int64_t>(count);
  if (total > limit) {
    throw GenerationError("the sequence would have " + std::to_string(total) +
                          " tokens but the model's context holds " + std::to_string(limit));
  }
  return total;
}

void check_rewind(std::int64_t held, std::int64_t length) {
  if (length < 0 || length > held) {
    throw GenerationError("a sequence of " + std::to_string(held) + " tokens cannot be rewound to " +
                          std::to_string(length));
  }
}

std::int64_t pending_limit(Manifest const& manifest, std::optional<std::int64_t> const& max_pending) {
  return max_pending ? whole_number("max_pending", *max_pending, 0) : manifest.max_pending;
}

}  // namespace tide

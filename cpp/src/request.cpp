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

// Throws if an option has no effect: in mode full, for a bundle without checkpoints, or for one prompt an option of
// batches.
void check_exits(Bundle const& bundle, GenerationConfig const& config, bool batched) {
  Manifest const& manifest = bundle.manifest;
  std::pair<char const*, bool> const options[] = {{"threshold", config.threshold.has_value()},
                                                  {"min_layers", config.min_layers.has_value()},
                                                  {"max_pending", config.max_pending.has_value()},
                                                  {"compaction_threshold", config.compaction_threshold.has_value()}};
  for (auto const& [option, set] : options) {
    if (!set) continue;
    std::string const name = option;
    if (name == "compaction_threshold" && !batched) {
      throw GenerationError(name + " is for a list of prompts: one prompt has nothing to be kept apart from");
    }
    if (config.mode == Mode::full) {
      throw GenerationError(name + " is for modes 'exit' and 'lossless', not 'full', where no token leaves early");
    }
    if (manifest.checkpoints.empty()) {
      throw GenerationError(name + " is for checkpoints, and bundle " + bundle.path.string() +
                            " has none: no token leaves early");
    }
  }
}

// Throws if top_k, top_p or min_p is set for greedy decoding, where they have no effect.
void check_sampling(GenerationConfig const& config) {
  std::pair<char const*, bool> const options[] = {
      {"top_k", config.top_k > 0}, {"top_p", config.top_p < 1}, {"min_p", config.min_p > 0}};
  for (auto const& [option, set] : options) {
    if (!set || config.temperature != 0) continue;
    throw GenerationError(std::string(option) +
                          " is for a temperature above 0: without one the most likely token is taken");
  }
}

// How lossless mode drafts.
Drafting drafting_of(Manifest const& manifest, GenerationConfig const& config) {
  if (config.drafting) {
    check_drafting(*config.drafting, manifest.checkpoints.size());
    if (config.drafting->thresholds.size() == manifest.checkpoints.size()) return *config.drafting;
    throw GenerationError("drafting.thresholds must have one value per checkpoint");
  }
  return manifest.drafting.value_or(default_drafting(manifest));
}

// The limits of drafting; none outside lossless mode.
std::optional<DraftLimits> draft_limits(Bundle const& bundle, GenerationConfig const& config) {
  if (config.mode != Mode::lossless) {
    if (!config.prompt_lookup && !config.drafter) return std::nullopt;
    throw GenerationError((config.prompt_lookup ? "prompt_lookup" : "drafter") +
                          std::string(" is for mode 'lossless', not '") + std::string(name_of(config.mode)) +
                          "': elsewhere nothing is drafted");
  }
  Drafting const drafting = drafting_of(bundle.manifest, config);
  DraftLimits limits(drafting);
  if (config.max_pending) limits.max_drafts = whole_number("max_pending", *config.max_pending, 0);
  if (config.prompt_lookup) limits.prompt_lookup = whole_number("prompt_lookup", *config.prompt_lookup, 0);
  if (config.drafter) limits.drafter = whole_number("drafter", *config.drafter, 0);
  limits.undo(bundle.manifest.model.undo());
  return limits;
}

// The compaction threshold of a list of prompts.
double compaction_share(Manifest const& manifest, GenerationConfig const& config) {
  auto const& chosen = config.compaction_threshold;
  double const share = chosen ? number_within("compaction_threshold", *chosen, 0, 1) : manifest.compaction_threshold;
  // In lossless mode pending tokens are drafts, all of which must go through every layer.
  return config.mode == Mode::lossless && !chosen ? 0 : share;
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
    if (!count || whole_number(name, *count, 0) <= manifest.model.vocab_size) continue;
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
  std::istringstream text(std::to_string(adapter) + ":" + salt);
  std::string const digest = sha256([&](char* to, std::size_t size) {
    text.read(to, static_cast<std::streamsize>(size));
    return static_cast<std::size_t>(text.gcount());
  });
  return -(std::int64_t{1} << 61) - std::stoll(digest.substr(0, kDigits), nullptr, 16);
}

}  // namespace

Request::Request(Backend const& backend, GenerationConfig const& config, std::optional<std::size_t> prompts)
    : mode(config.mode),
      max_new_tokens(whole_number("max_new_tokens", config.max_new_tokens, 1)),
      thresholds(resolve_thresholds(backend.manifest(), config)),
      drafts(draft_limits(backend.bundle(), config)),
      max_pending(drafts ? kNoLimit : pending_limit(backend.manifest(), config.max_pending)),
      adapter(adapter_of(backend, config.adapter)),
      cache_root(config.cache_salt ? salted(*config.cache_salt, adapter) : -adapter) {
  Bundle const& bundle = backend.bundle();
  auto const seeds = prompts ? seeds_of(config, *prompts) : std::vector{single_seed(config)};
  for (std::optional<std::int64_t> const seed : seeds) samplers.emplace_back(config, seed);
  check_sampling(config);
  check_exits(bundle, config, prompts.has_value());
  stop_token_ids = stop_ids(bundle.manifest, config);
  check_logits(bundle.manifest, config);
  stop = stop_strings(config);
  detokenizer = config.detokenizer;
  states = config.states;
  if (states && mode != Mode::full && mode != Mode::exit) {
    throw GenerationError("states is for modes 'full' and 'exit', not '" + std::string(name_of(mode)) +
                          "', whose drafts have states that are not kept");
  }
  if (config.prompt_logprobs) prompt_logprobs = static_cast<std::size_t>(*config.prompt_logprobs);
  if (prompts) compaction_threshold = compaction_share(bundle.manifest, config);
}

GenerationConfig without_auto(Bundle const& bundle, GenerationConfig config, std::optional<AutoMode> const& measured,
                              bool batched) {
  if (config.mode != Mode::automatic) return config;
  check_exits(bundle, config, batched);
  pending_limit(bundle.manifest, config.max_pending);
  if (batched) compaction_share(bundle.manifest, config);
  if (config.prompt_lookup || config.drafter) {
    throw GenerationError((config.prompt_lookup ? "prompt_lookup" : "drafter") +
                          std::string(" is for mode 'lossless', not 'auto': elsewhere nothing is drafted"));
  }
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
  if (low <= real_number(name, value) && value <= high) return value;
  throw GenerationError(std::string(name) + " must lie in [" + std::to_string(low) + ", " + std::to_string(high) +
                        "], not " + shown(value));
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

#include "request.h"

#include <cmath>
#include <limits>
#include <utility>

#include "formatting.h"

namespace tide {

std::int64_t whole_number(char const* name, std::int64_t value, std::int64_t least) {
  if (value >= least) return value;
  throw GenerationError(std::string(name) + " must be a whole number, " + std::to_string(least) + " or more, not " +
                        std::to_string(value));
}

double real_number(char const* name, double value) {
  if (std::isfinite(value)) return value;
  throw GenerationError(std::string(name) + " must be a number, not " + shown(value));
}

Mode mode_of(std::string_view name) {
  if (name == "full") return Mode::full;
  if (name == "exit") return Mode::exit;
  if (name == "lossless") return Mode::lossless;
  throw GenerationError("mode must be 'full', 'exit' or 'lossless', not '" + std::string(name) + "'");
}

std::vector<double> resolve_thresholds(Manifest const& manifest, Request const& request) {
  bool const lossless = request.mode == Mode::lossless;
  std::vector<std::int64_t> const& points = manifest.checkpoints;
  // What min_layers guards is the quality of exits; drafts are verified.
  std::int64_t const least =
      request.min_layers ? whole_number("min_layers", *request.min_layers, 0) : (lossless ? 0 : manifest.min_layers);
  std::vector<double> values = lossless && manifest.drafting ? manifest.drafting->thresholds : manifest.thresholds;
  if (request.threshold) values = request.threshold->values(points.size());
  if (values.size() != points.size()) {
    throw GenerationError("threshold has " + std::to_string(values.size()) + " values but the model has " +
                          std::to_string(points.size()) + " checkpoints (" + joined(points, ", ") +
                          "): give one value, or one per checkpoint");
  }
  for (double const value : values) {
    if (!(0 <= value && value <= 1)) throw GenerationError("threshold must lie in [0, 1], not " + shown(value));
  }
  for (std::size_t k = 0; k < points.size(); ++k) {
    if (request.mode == Mode::full || points[k] < least) values[k] = kOff;
  }
  return values;
}

void check_thresholds(Manifest const& manifest, std::vector<double> const& thresholds) {
  if (thresholds.size() != manifest.checkpoints.size()) {
    throw GenerationError(std::to_string(thresholds.size()) + " thresholds for " +
                          std::to_string(manifest.checkpoints.size()) + " checkpoints");
  }
  for (double const value : thresholds) {
    if (std::isnan(value)) throw GenerationError("a threshold must be a number, not nan");
  }
}

void check_exits(Bundle const& bundle, Request const& request, bool several) {
  Manifest const& manifest = bundle.manifest;
  std::pair<char const*, bool> const options[] = {{"threshold", request.threshold.has_value()},
                                                  {"min_layers", request.min_layers.has_value()},
                                                  {"max_pending", request.max_pending.has_value()},
                                                  {"compaction_threshold", request.compaction_threshold.has_value()}};
  for (auto const& [option, given] : options) {
    if (!given) continue;
    std::string const name = option;
    if (name == "compaction_threshold" && !several) {
      throw GenerationError(name + " is for a list of prompts: one prompt has nothing to be kept apart from");
    }
    if (request.mode == Mode::full) {
      throw GenerationError(name + " is for modes 'exit' and 'lossless', not 'full', where no token leaves early");
    }
    if (manifest.checkpoints.empty()) {
      throw GenerationError(name + " is for checkpoints, and bundle " + bundle.path.string() +
                            " has none: no token leaves early");
    }
    if ((name == "max_pending" || name == "compaction_threshold") && manifest.propagates()) {
      throw GenerationError(name + " is for an exact K/V cache: bundle " + bundle.path.string() +
                            " propagates, so that nothing waits");
    }
  }
}

void check_sampling(Request const& request) {
  std::pair<char const*, bool> const options[] = {{"top_k", request.top_k > 0}, {"top_p", request.top_p < 1}};
  for (auto const& [option, given] : options) {
    if (!given || request.temperature != 0) continue;
    throw GenerationError(std::string(option) +
                          " is for a temperature above 0: without one the most likely token is taken");
  }
}

void check_prompt(Manifest const& manifest, std::vector<std::int64_t> const& prompt, std::string const& what) {
  if (prompt.empty()) throw GenerationError(what + " is empty: give at least one token");
  for (std::int64_t const id : prompt) {
    if (id >= 0 && id < manifest.model.vocab_size) continue;
    throw GenerationError(what + " holds token id " + std::to_string(id) + ", outside the vocabulary 0.." +
                          std::to_string(manifest.model.vocab_size - 1));
  }
  auto const& context = manifest.model.context_length;
  if (context && static_cast<std::int64_t>(prompt.size()) > *context) {
    throw GenerationError(what + " has " + std::to_string(prompt.size()) + " tokens but the model's context holds " +
                          std::to_string(*context));
  }
}

std::int64_t context_of(Manifest const& manifest) {
  return manifest.model.context_length.value_or(std::numeric_limits<std::int32_t>::max());
}

std::int64_t length_after(std::int64_t length, std::size_t count, std::int64_t limit) {
  if (count == 0) throw GenerationError("a step needs at least one token");
  std::int64_t const after = length + static_cast<std::int64_t>(count);
  if (after > limit) {
    throw GenerationError("the sequence would have " + std::to_string(after) +
                          " tokens but the model's context holds " + std::to_string(limit));
  }
  return after;
}

std::optional<DraftLimits> draft_limits(Bundle const& bundle, Request const& request) {
  if (request.mode != Mode::lossless) {
    if (!request.prompt_lookup) return std::nullopt;
    throw GenerationError(std::string("prompt_lookup is for mode 'lossless', not '") +
                          (request.mode == Mode::full ? "full" : "exit") + "': elsewhere nothing is drafted");
  }
  DraftLimits limits;
  if (auto const& own = bundle.manifest.drafting) limits = {own->max_drafts, own->prompt_lookup, own->min_match};
  if (request.max_pending) limits.max_drafts = whole_number("max_pending", *request.max_pending, 0);
  if (request.prompt_lookup) limits.prompt_lookup = whole_number("prompt_lookup", *request.prompt_lookup, 0);
  if (bundle.manifest.propagates()) {
    throw GenerationError("mode 'lossless' needs an exact K/V cache, and bundle " + bundle.path.string() +
                          " propagates: export it with kv_cache_strategy exact");
  }
  return limits;
}

std::int64_t waiting_limit(Manifest const& manifest, std::optional<std::int64_t> const& max_pending) {
  return max_pending ? whole_number("max_pending", *max_pending, 0) : manifest.max_pending;
}

double share_of(Manifest const& manifest, Request const& request) {
  auto const& given = request.compaction_threshold;
  double const share = given ? real_number("compaction_threshold", *given) : manifest.compaction_threshold;
  if (!(0 <= share && share <= 1)) {
    throw GenerationError("compaction_threshold must lie in [0, 1], not " + shown(share));
  }
  if (request.mode != Mode::lossless) return share;
  // What waits are drafts, all of which have to go through every layer. But where tokens are drawn, when a sequence is
  // verified decides what is drawn: each goes by itself.
  if (request.temperature == 0) return given ? share : 0;
  if (given && share < 1) {
    throw GenerationError(
        "compaction_threshold is 1 in mode 'lossless' with a temperature: each sequence is verified by itself, so that "
        "it draws what it would draw alone");
  }
  return 1;
}

std::optional<std::int64_t> seed_of(Request const& request) {
  if (!request.seed) return std::nullopt;
  if (request.seed->for_all()) return request.seed->values()[0];
  throw GenerationError("seed must be a whole number, 0 or more, not [" + joined(request.seed->values(), ", ") + "]");
}

std::vector<std::optional<std::int64_t>> seeds_of(Request const& request, std::size_t prompts) {
  if (!request.seed || request.seed->for_all()) {
    return std::vector<std::optional<std::int64_t>>(prompts, seed_of(request));
  }
  std::vector<std::int64_t> const& own = request.seed->values();
  if (own.size() == prompts) return {own.begin(), own.end()};
  throw GenerationError("there are " + std::to_string(own.size()) + " seeds for " + std::to_string(prompts) +
                        " prompts: give one for each, or one for all");
}

std::set<std::int64_t> stops_of(Manifest const& manifest, Request const& request) {
  auto const& ids = request.stop_token_ids ? *request.stop_token_ids : manifest.model.eos_token_ids;
  return {ids.begin(), ids.end()};
}

}  // namespace tide

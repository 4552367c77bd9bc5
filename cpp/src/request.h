// Checks a `GenerationConfig` and completes it from a bundle's manifest before any step. All functions throw GenerationError
// with a sentence that names the option.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "bundle/store.h"
#include "decoding/lossless.h"
#include "decoding/sampling.h"
#include "tide/runtime.h"

namespace tide {

class Backend;

// A configuration resolved for one bundle.
struct Request {
  // config: its mode is not `automatic`.
  // prompts: how many there are in a list of prompts; none: one prompt that is not in a list.
  Request(Backend& backend, GenerationConfig const& config, std::optional<std::size_t> prompts);

  Mode mode;
  std::int64_t max_new_tokens;
  std::vector<double> thresholds;     // one per checkpoint, kNeverExit where none may exit
  std::optional<DraftLimits> drafts;  // none outside lossless mode
  std::int64_t max_pending;           // kNoLimit in lossless mode: the decoder decides when to verify
  double compaction_threshold = 1;    // for a list of prompts
  std::vector<Sampler> samplers;      // one per prompt
  std::set<std::int64_t> stop_token_ids;
  std::vector<std::int64_t> prediction;  // to draft from
  std::vector<std::string> stop;  // none is empty
  Detokenizer detokenizer;        // none: no text is made
  std::int64_t adapter;           // as `Backend::adapter` gives it
  std::int64_t cache_root;        // by the adapter, whose K/V are no other's, and the salt
  bool states;                    // whether the generation gets its hidden states
  std::optional<std::size_t> prompt_logprobs;  // the most likely tokens to return for each of the prompt's; none: nothing

  // Whether each token of the prompt must be run, also one whose K/V are known.
  bool reads_all() const { return prompt_logprobs || (states && mode == Mode::full); }

  // Whether its tokens may be audited: those that are made for their hidden states say nothing about the thresholds.
  bool auditable() const { return mode == Mode::exit && !states; }
};

// How lossless mode drafts: as the configuration says, else the bundle, else the default.
Drafting drafting_of(Manifest const& manifest, GenerationConfig const& config);

// The limits of drafting, with costs as they are now; none outside lossless mode.
std::optional<DraftLimits> draft_limits(Backend& backend, GenerationConfig const& config);

// `config` without mode `automatic`: with the mode that it is, its thresholds, and none of the options that this mode
// does not have. Which options are accepted does not depend on what was measured. `batched`: for a list of prompts.
GenerationConfig without_auto(Bundle const& bundle, GenerationConfig config, std::optional<AutoMode> const& measured,
                              bool batched);

// The number of the adapter of this name, as `Backend::adapter` gives it; 0 without a name. Throws: there is none.
std::int64_t adapter_of(Backend const& backend, std::optional<std::string> const& name);

// Throws unless each number of a configuration is within its limits, thresholds excepted; returns it.
GenerationConfig const& within_limits(GenerationConfig const& config);

// Throws unless `value` is `minimum` or more; returns it.
std::int64_t whole_number(char const* name, std::int64_t value, std::int64_t minimum);

// Throws unless `value` is finite; returns it.
double real_number(char const* name, double value);

// Throws unless `value` is a number from `low` to `high`; returns it.
double number_within(char const* name, double value, int low, int high);

// Throws unless all ids are of the vocabulary; `name`: what holds them, in messages.
void check_vocabulary(Manifest const& manifest, std::vector<std::int64_t> const& ids, std::string const& name);

// Throws unless there is one threshold per checkpoint and none is NaN.
void check_thresholds(Manifest const& manifest, std::vector<double> const& thresholds);

// Throws unless the prompt has tokens of the vocabulary alone and fits the context; `name` is its name in messages.
void check_prompt(Manifest const& manifest, std::vector<std::int64_t> const& prompt, std::string const& name);

// The maximum number of tokens of a sequence on ONNX Runtime, whose graphs count them in 32 bits.
std::int64_t context_of(Manifest const& manifest);

// The number of tokens after a step over `count` more. Throws if `count` is 0 or the result exceeds `limit`.
std::int64_t length_after(std::int64_t length, std::size_t count, std::int64_t limit);

// Throws unless a sequence of `held` tokens can be rewound to `length`.
void check_rewind(std::int64_t held, std::int64_t length);

// `max_pending`, checked, else the bundle's.
std::int64_t pending_limit(Manifest const& manifest, std::optional<std::int64_t> const& max_pending);

}  // namespace tide

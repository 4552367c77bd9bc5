// Counts exits per layer, layers run, and time of a generation. The names are those of the Python package's ExitStats, and
// `json` returns the fields of its `as_dict`.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tide {

// Exits, layers and seconds of one generation; the layers of a token are those of the step that produced it.
struct ExitStats {
  std::vector<std::int64_t> checkpoints;  // layers before each
  std::int64_t num_layers = 0;
  std::int64_t prompt_tokens = 0;
  std::vector<std::int64_t> exit_layer;  // per token: layers before its logits; 0: a draft without layers
  std::vector<std::int64_t> layers_run;  // per token: layer passes its step executed
  std::int64_t layer_tokens_run = 0;     // positions x layers computed so far, the prompt's included
  std::int64_t layer_tokens_total = 0;   // positions x layers at full depth
  std::int64_t drafted = 0;              // lossless mode: tokens drafted, by any source
  std::int64_t accepted = 0;             // drafts that the full model accepted
  std::int64_t lookup_drafted = 0;       // tokens drafted by prompt lookup
  std::int64_t lookup_accepted = 0;      // drafts by prompt lookup that were accepted
  std::int64_t learned_drafted = 0;      // tokens drafted by the bundle's drafter
  std::int64_t learned_accepted = 0;     // drafts by the drafter that were accepted
  std::int64_t answers_drafted = 0;      // tokens drafted from answers to earlier requests
  std::int64_t answers_accepted = 0;     // drafts from these that were accepted
  double exit_saved_seconds = 0;         // by costs, of `decode_seconds`: what drafts saved, negative where they cost more
  double lookup_saved_seconds = 0;
  double learned_saved_seconds = 0;
  double answers_saved_seconds = 0;
  double prefill_seconds = 0;            // the step over the prompt, which yields the first token
  double decode_seconds = 0;             // all later steps

  std::int64_t total_tokens() const { return static_cast<std::int64_t>(exit_layer.size()); }
  std::map<std::int64_t, std::int64_t> exits_per_layer() const;  // tokens by checkpoint; the last layer is no exit
  std::int64_t total_exited() const;
  std::int64_t remaining_tokens() const;  // tokens from full depth: neither early exits nor drafts without layers
  double exit_rate() const;               // share of tokens that exited, in [0, 1]
  double acceptance_rate() const;         // share of drafts that were accepted; 0 outside lossless mode
  double layers_run_per_token() const;
  double layers_skipped_per_token() const;
  double tokens_per_second() const;  // tokens after the first, divided by the seconds they took

  // Returns all of the above as a JSON object on one line.
  std::string json() const;
};

}  // namespace tide

// Statistics of a generation: exits per layer, layers run, and time. The names are those of the Python package's
// ExitStats, and `json` returns the fields of its `as_dict`.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tide {

// Exits, layers and seconds of one generation; the layers of a token are those of the step that produced it.
struct ExitStats {
  std::vector<std::int64_t> checkpoints;  // layers run at each
  std::int64_t num_layers = 0;
  std::int64_t prompt_tokens = 0;
  std::vector<std::int64_t> exit_layer;  // per token: layers its logits went through; 0: drafted by no layer
  std::vector<std::int64_t> layers_run;  // per token: layer passes its step executed
  std::int64_t layer_tokens_run = 0;     // positions x layers computed so far, the prompt's included
  std::int64_t layer_tokens_total = 0;   // what full depth would have computed for the same positions
  std::int64_t drafted = 0;              // lossless mode: tokens drafted, by early exits and by prompt lookup
  std::int64_t accepted = 0;             // drafts that the full model accepted
  std::int64_t lookup_drafted = 0;       // of `drafted`, those by prompt lookup
  std::int64_t lookup_accepted = 0;      // of `accepted`, those by prompt lookup
  std::int64_t learned_drafted = 0;      // of `drafted`, those of the bundle's drafter
  std::int64_t learned_accepted = 0;     // of `accepted`, those of the bundle's drafter
  double prefill_seconds = 0;            // the step over the prompt, which yields the first token
  double decode_seconds = 0;             // all steps after it

  std::int64_t total_tokens() const { return static_cast<std::int64_t>(exit_layer.size()); }
  std::map<std::int64_t, std::int64_t> exits_per_layer() const;  // tokens by checkpoint; the last layer is no exit
  std::int64_t total_exited() const;
  std::int64_t remaining_tokens() const;  // tokens from full depth: neither early exits nor drafts by no layer
  double exit_rate() const;               // share of tokens that exited, in [0, 1]
  double acceptance_rate() const;         // share of drafts that were accepted; 0 outside lossless mode
  double layers_run_per_token() const;
  double layers_skipped_per_token() const;
  double tokens_per_second() const;  // tokens after the first, divided by the seconds they took

  // All of the above as a JSON object on one line.
  std::string json() const;
};

}  // namespace tide

// Lossless mode: tokens that exit early are drafts, and one run of the deep segments over all pending tokens verifies
// them. The rule is that of tide_export/runtime/decoding/lossless.py, which cites the papers.
#pragma once

#include <memory>
#include <set>
#include <vector>

#include "decoding/decoder.h"
#include "decoding/sampling.h"

namespace tide {

// How far a decoder may draft, as `Drafting`.
struct DraftLimits {
  std::int64_t max_drafts = 0;     // early exits that one verification may cover; 0: none
  std::int64_t prompt_lookup = 0;  // tokens of one prompt-lookup draft, at most; 0: none
  std::vector<double> draft_costs;
  std::vector<double> verify_costs;
};

// How a bundle drafts that was not tuned: by its exits, where an accepted one is expected to be worth its cost.
Drafting default_drafting(Manifest const& manifest);

// The decoder of lossless mode. stops: the tokens that end the generation.
std::unique_ptr<Decoder> make_lossless_decoder(Manifest const& manifest, Sampler sampler, DraftLimits const& limits,
                                               std::set<std::int64_t> const& stops);

}  // namespace tide

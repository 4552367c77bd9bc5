// Lossless mode: tokens that exit early are drafts, and one run of the deep segments over all pending tokens verifies
// them. The rule is that of tide_export/runtime/decoding/lossless.py, which cites the papers.
#pragma once

#include <memory>
#include <set>
#include <vector>

#include "decoding/decoder.h"
#include "decoding/sampling.h"

namespace tide {

// How far a decoder may draft, as `Drafting`; the defaults are for bundles without that record.
struct DraftLimits {
  std::int64_t max_drafts = 6;     // early exits that one verification may cover; 0: none
  std::int64_t prompt_lookup = 8;  // tokens of one prompt-lookup draft, at most; 0: none
  std::vector<double> draft_costs{};  // `default_draft_costs`
  std::vector<double> verify_costs{0.13, 0.18, 0.3, 0.54, 1.0};
};

// Costs of early exits that were not measured: a share of the layers, and the head. depths: layers up to the end of
// each segment.
std::vector<double> default_draft_costs(std::vector<std::int64_t> const& depths);

// The decoder of lossless mode. stops: the tokens that end the generation.
std::unique_ptr<Decoder> make_lossless_decoder(Manifest const& manifest, Sampler sampler, DraftLimits const& limits,
                                               std::set<std::int64_t> const& stops);

}  // namespace tide

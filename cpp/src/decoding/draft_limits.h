// Checks the draft limits of a bundle or a request for lossless mode, and fills in the defaults.
#pragma once

#include <cstdint>
#include <vector>

#include "decoding/draft_costs.h"
#include "tide/manifest.h"

namespace tide {

// How far a decoder may draft, as `Drafting`.
struct DraftLimits {
  DraftLimits() = default;
  explicit DraftLimits(Drafting const& drafting);

  // Whether anything may be drafted.
  bool may_draft(bool has_drafter) const { return max_drafts > 0 || prompt_lookup > 0 || (has_drafter && drafter > 0); }

  // Keeps what one verification may reject within so many tokens.
  void undo(std::int64_t tokens);

  std::int64_t max_drafts = 0;     // early exits that one verification may cover; 0: none
  std::int64_t prompt_lookup = 0;  // tokens of one prompt-lookup draft, at most; 0: none
  std::int64_t drafter = 0;        // drafts of the bundle's drafter that one verification may cover; 0: none
  std::vector<double> thresholds;  // one per checkpoint: a token whose score is not above does not exit to be a draft
  StepCosts costs;
  char const* costs_source = "assumed";  // as `Drafting::costs_source`
};

// Throws GenerationError unless the limits and costs are those of a model with so many checkpoints.
void check_drafting(Drafting const& drafting, std::size_t checkpoints);

// Costs as they are where nothing is measured.
StepCosts assumed_costs(Manifest const& manifest);

// The costs that are given with a drafting, of which verify_costs are.
StepCosts given_costs(Drafting const& drafting);

// How a bundle drafts that was not tuned.
Drafting default_drafting(Manifest const& manifest);

}  // namespace tide

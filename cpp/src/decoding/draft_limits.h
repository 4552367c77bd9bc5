// Checks the draft limits of a bundle or a request for lossless mode, and fills in the defaults.
#pragma once

#include <cstdint>
#include <vector>

#include "tide/manifest.h"

namespace tide {

// How far a decoder may draft, as `Drafting`.
struct DraftLimits {
  DraftLimits() = default;
  explicit DraftLimits(Drafting const& drafting);

  // Keeps what one verification may reject within so many tokens.
  void undo(std::int64_t tokens);

  std::int64_t max_drafts = 0;     // early exits that one verification may cover; 0: none
  std::int64_t prompt_lookup = 0;  // tokens of one prompt-lookup draft, at most; 0: none
  std::int64_t drafter = 0;        // drafts of the bundle's drafter that one verification may cover; 0: none
  std::vector<double> draft_costs;
  std::vector<double> verify_costs;
  double drafter_cost = 0.1;
};

// Throws GenerationError unless the limits and costs are those of a model with so many checkpoints.
void check_drafting(Drafting const& drafting, std::size_t checkpoints);

// How a bundle drafts that was not tuned: by its exits, where an accepted one is expected to be worth its cost.
Drafting default_drafting(Manifest const& manifest);

}  // namespace tide

// Replays lossless mode on a recorded text, without a model, for `tide-export tune`. After a wrong draft nothing was recorded;
// the replay uses the record of the right text there, which only affects how much is drafted in vain.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "decoding/lossless.h"

namespace tide {

// A continuation of a prompt, by position.
struct Recording {
  std::vector<std::int64_t> prompt;
  std::size_t checkpoints = 0;
  float const* scores;        // [positions, checkpoints], of the routers
  std::int64_t const* early;  // [positions, checkpoints], the token of an exit at each
  std::int64_t const* full;   // [positions], the token of full depth
  std::size_t positions = 0;
};

struct Replayed {
  DraftCounts counts;
  std::vector<std::int64_t> exits;  // drafts made at each checkpoint
  // Of each verifying run after that of the prompt, tokens that were pending before the deep segments, and new tokens.
  std::vector<std::pair<std::int64_t, std::int64_t>> runs;
};

Replayed replay(Recording const& recording, DraftLimits const& limits);

}  // namespace tide

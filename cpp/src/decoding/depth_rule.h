// Decides which sequences of a step run a segment: one rule for every engine (docs/architecture/lazy-depth.md), on the host
// and on a GPU.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tide {

// Whether a sequence that ran the segment before, if only to catch up, needs the next one. pending: its tokens that would
// be pending there.
constexpr bool is_active(bool exited, std::int64_t pending, std::int64_t max_pending) {
  return !exited || pending > max_pending;
}

// Whether all sequences of a step run a segment that `active` of them need; else these alone. all_ran: whether all of
// them ran the segment before.
constexpr bool all_catch_up(std::size_t active, std::size_t everyone, bool all_ran, double compaction_threshold) {
  return static_cast<double>(active) >= compaction_threshold * static_cast<double>(everyone) && all_ran;
}

// Whether a sequence that exited has the logits of its exit; else those of full depth. deep: whether all segments ran over
// it.
constexpr bool at_its_exit(bool verifies, bool deep) { return !verifies || !deep; }

}  // namespace tide

// Decides which sequences of a step run through a segment: one rule for every engine (docs/architecture/lazy-depth.md).
#pragma once

#include <cstddef>
#include <cstdint>

namespace tide {

// Whether a sequence that ran the segment before, if only to catch up, needs the next one. pending: its tokens that would
// be pending there.
inline bool is_active(bool exited, std::int64_t pending, std::int64_t max_pending) {
  return !exited || pending > max_pending;
}

// Whether all sequences of a step run a segment that `active` of them need; else these alone. all_ran: whether all of
// them ran the segment before.
inline bool all_catch_up(std::size_t active, std::size_t everyone, bool all_ran, double compaction_threshold) {
  return static_cast<double>(active) >= compaction_threshold * static_cast<double>(everyone) && all_ran;
}

}  // namespace tide

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

// Routers may give the probability of an exit there of what has not exited before; `share`, of an exit before it, is 0 at
// first (`NetworksInfo::cumulative`). Their score is then that of an exit there or before.
constexpr float cumulative_score(float share, float probability) { return share + (1.0F - share) * probability; }

// The threshold that a router's probability is above where its score is above `threshold`.
constexpr float threshold_of_rest(float threshold, float share) {
  float const rest = 1.0F - share;
  return rest > 0.0F ? (threshold - share) / rest : share > threshold ? -1.0F : 2.0F;
}

}  // namespace tide

#include "segmented/run_plan.h"

#include <algorithm>
#include <optional>

namespace tide {
namespace {

// Tokens of each slot in one run over `start` .. `last`, of which none has more than `count` to run; none: there is no
// room for its padding.
std::optional<std::int64_t> padded_tokens(std::size_t start, std::size_t last, std::int64_t count,
                                          std::vector<std::int64_t> const& lengths, NetworksInfo const& info) {
  std::int64_t longest = 0;
  for (std::size_t slot = start; slot <= last; ++slot) longest = std::max(longest, lengths[slot]);
  std::int64_t const tokens = padded(count, longest, info.max_slot_tokens, info.capacity);
  if (longest + tokens > info.capacity) return std::nullopt;
  return tokens;
}

}  // namespace

std::int64_t padded(std::int64_t count, std::int64_t length, std::int64_t max_tokens, std::int64_t capacity) {
  std::int64_t rounded = 1;
  while (rounded < count) rounded *= 2;
  return rounded <= max_tokens && length + rounded <= capacity ? rounded : count;
}

std::int64_t keys_for(std::int64_t length, NetworksInfo const& info) {
  std::int64_t keys = info.cuda ? info.capacity : 512;
  while (keys < length) keys *= 4;
  return std::min(keys, info.capacity);
}

std::vector<Run> runs_over(std::vector<RunCount> const& counts, std::vector<std::int64_t> const& lengths,
                           NetworksInfo const& info) {
  std::vector<Run> runs;
  std::int64_t most = 0;  // tokens that a slot of the last run has to run
  for (auto const& [slot, count] : counts) {
    if (count > info.max_slot_tokens) continue;
    if (!runs.empty()) {
      std::int64_t const larger = std::max(most, count);
      if (auto const tokens = padded_tokens(runs.back().start(), slot, larger, lengths, info)) {
        runs.back().active.push_back(slot);
        runs.back().tokens = *tokens;
        most = larger;
        continue;
      }
    }
    // One slot's tokens always fit its buffers.
    runs.push_back({{slot}, padded(count, lengths[slot], info.max_slot_tokens, info.capacity)});
    most = count;
  }
  for (auto const& [slot, count] : counts) {
    if (count <= info.max_slot_tokens) continue;
    runs.push_back({{slot}, padded(count, lengths[slot], info.max_tokens, info.capacity)});
  }
  for (Run& run : runs) {
    auto const longest = std::max_element(lengths.begin() + static_cast<std::ptrdiff_t>(run.start()),
                                          lengths.begin() + static_cast<std::ptrdiff_t>(run.stop()));
    run.keys = keys_for(*longest + run.tokens, info);
  }
  return runs;
}

}  // namespace tide

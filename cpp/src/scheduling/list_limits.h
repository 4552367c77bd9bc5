// Limits of a step loop for the prompts of a list, or for a stream's one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "tide/scheduler.h"

namespace tide {

// How many prompts of a list are decoded at once: their logits are in memory together.
inline std::int64_t list_slots(std::size_t prompts) {
  constexpr std::size_t kSlots = 32;
  return static_cast<std::int64_t>(std::min(prompts, kSlots));
}

// tokens: of all prompts together.
inline SchedulerLimits list_limits(std::size_t prompts, std::size_t tokens) {
  constexpr std::size_t kPromptTokens = 2048;  // in one step: no token of others waits for them
  SchedulerLimits limits;
  limits.slots = list_slots(prompts);
  limits.prompt_tokens = static_cast<std::int64_t>(std::clamp<std::size_t>(tokens, 1, kPromptTokens));
  return limits;
}

}  // namespace tide

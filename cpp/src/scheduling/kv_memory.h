// Finds how much K/V the requests of a scheduler may have.
#pragma once

#include <cstdint>

#include "bundle/store.h"
#include "sequence.h"
#include "tide/scheduler.h"

namespace tide {

// Tokens of K/V that requests with a slot may have: no step fails for want of memory in the middle of one, and no request
// makes the process have more than it may.
std::int64_t kv_tokens_of(Batch const& batch, Manifest const& manifest, SchedulerLimits const& limits);

}  // namespace tide

#include "attention.h"

#include <cmath>

#include "intrinsics.h"
#include "targets.h"

namespace tide_ops {
namespace {

using Kernel = AttentionKernel;
constexpr std::int64_t kBlock = 64;                     // keys that all queries read, one after another
constexpr std::int64_t kAhead = 4096, kAheadKeys = 64;   // bytes from keys that are read to those that are prefetched
constexpr float kLowest = -1e30f, kHidden = -2 * 1e30f;  // of all scores; of a key that a query does not attend to

#define TIDE_KERNEL "attention.inc"
#include "each_target.inc"

}  // namespace

std::int64_t partial_floats(Attention const& attention, std::int64_t queries) {
  return queries * (attention.width + 2);
}

std::int64_t scratch_floats(Attention const& attention, std::int64_t queries) {
  return (queries + 1) * kChunk + kBlock * attention.width;
}

AttentionKernel const* attention_kernel(char const* name) { return kernel_of(name); }

}  // namespace tide_ops

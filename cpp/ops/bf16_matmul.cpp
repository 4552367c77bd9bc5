#include "bf16_matmul.h"

#include "targets.h"

namespace tide_ops {
namespace {

using Kernel = Bf16Kernel;
constexpr std::int64_t kLine = 32;     // weights in a line of the cache
constexpr std::int64_t kAhead = 2048;  // weights from those that are multiplied by to those that are prefetched

inline float widen(std::uint16_t weight) {
  std::uint32_t const bits = std::uint32_t{weight} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

#define TIDE_KERNEL "bf16_matmul.inc"
#include "each_target.inc"

}  // namespace

Bf16Kernel const* bf16_kernel(char const* name) { return kernel_of(name); }

}  // namespace tide_ops

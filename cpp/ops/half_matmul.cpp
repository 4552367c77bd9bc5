#include "half_matmul.h"

#include "intrinsics.h"
#include "targets.h"

namespace tide_ops {
namespace {

struct Kernel {
  HalfKernel formats[2];
};

constexpr std::int64_t kLine = 32;     // weights in a line of the cache
constexpr std::int64_t kAhead = 2048;  // weights from those that are multiplied by to those that are prefetched

#define TIDE_KERNEL "half_matmul.inc"
#include "each_target.inc"

}  // namespace

HalfKernel const* half_kernel(HalfFormat format, char const* name) {
  Kernel const* const kernel = kernel_of(name);
  return kernel == nullptr ? nullptr : &kernel->formats[static_cast<int>(format)];
}

}  // namespace tide_ops

#include "elementwise.h"

#include "intrinsics.h"
#include "targets.h"

namespace tide_ops {
namespace {

using Kernel = ElementwiseKernel;

#define TIDE_KERNEL "elementwise.inc"
#include "each_target.inc"

}  // namespace

ElementwiseKernel const* elementwise_kernel(char const* name) { return kernel_of(name); }

}  // namespace tide_ops

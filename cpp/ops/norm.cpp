#include "norm.h"

#include <cmath>

#include "targets.h"

namespace tide_ops {
namespace {

using Kernel = NormKernel;

#define TIDE_KERNEL "norm.inc"
#include "each_target.inc"

}  // namespace

NormKernel const* norm_kernel(char const* name) { return kernel_of(name); }

}  // namespace tide_ops

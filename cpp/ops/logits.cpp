#include "logits.h"

#include <limits>

#include "targets.h"

namespace tide_ops {
namespace {

using Kernel = LogitsKernel;

#define TIDE_KERNEL "logits.inc"
#include "each_target.inc"

}  // namespace

LogitsKernel const* logits_kernel(char const* name) { return kernel_of(name); }

}  // namespace tide_ops

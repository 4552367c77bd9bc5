#include "lora.h"

#include "targets.h"

namespace tide_ops {
namespace {

using Kernel = LoraKernel;

#define TIDE_KERNEL "lora.inc"
#include "each_target.inc"

}  // namespace

LoraKernel const* lora_kernel(char const* name) { return kernel_of(name); }

}  // namespace tide_ops

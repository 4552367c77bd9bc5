#include "recurrence.h"

#include "targets.h"

namespace tide_ops {
namespace {

using Kernel = RecurrenceKernel;

#define TIDE_KERNEL "recurrence.inc"
#include "each_target.inc"

}  // namespace

RecurrenceKernel const* recurrence_kernel(char const* name) { return kernel_of(name); }

}  // namespace tide_ops

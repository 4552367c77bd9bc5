#include "elementwise.h"

#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of GCC 12's own header
#endif
#include <immintrin.h>
#endif

#include "targets.h"

namespace tide_ops {
namespace {

using Kernel = ElementwiseKernel;

#define TIDE_KERNEL "elementwise.inc"
#include "each_target.inc"

}  // namespace

ElementwiseKernel const* elementwise_kernel(char const* name) { return kernel_of(name); }

}  // namespace tide_ops

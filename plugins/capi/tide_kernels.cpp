#include "capi/tide_kernels.h"

#if defined(TIDE_EMULATED)
#include "common/block.cuh"
#endif

extern "C" int32_t tide_kernels_version() { return TIDE_KERNELS_VERSION; }

extern "C" cudaError_t tide_kernels_emulate(uint64_t order) {
#if defined(TIDE_EMULATED)
  tide::emulation() = {order};
  return cudaSuccess;
#else
  (void)order;
  return cudaErrorNotSupported;
#endif
}

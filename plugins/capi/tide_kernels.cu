#include "capi/tide_kernels.h"

#include "common/block.cuh"

extern "C" int32_t tide_kernels_version() { return TIDE_KERNELS_VERSION; }

extern "C" cudaError_t tide_kernels_emulate(uint64_t order, int32_t compute_capability_major) {
#if defined(__CUDACC__)
  (void)order;
  (void)compute_capability_major;
  return cudaErrorNotSupported;
#else
  tide::emulation() = {order, compute_capability_major};
  return cudaSuccess;
#endif
}

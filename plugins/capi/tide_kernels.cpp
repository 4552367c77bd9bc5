#include "capi/tide_kernels.h"

#if defined(TIDE_EMULATED)
#include "common/team.cuh"
#endif

extern "C" int32_t tide_kernels_version() { return TIDE_KERNELS_VERSION; }

extern "C" cudaError_t tide_kernels_emulate(uint64_t order, int32_t compute_capability_major) {
#if defined(TIDE_EMULATED)
  tide::emulation() = {order, compute_capability_major};
  return cudaSuccess;
#else
  (void)order;
  (void)compute_capability_major;
  return cudaErrorNotSupported;
#endif
}

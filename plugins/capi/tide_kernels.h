/* The C interface of libtide_kernels: everything a runtime, a plugin or a test needs, and no TensorRT.

   Every function starts its work on the stream it is given and returns; nothing is allocated, nothing waits, and all of
   it can be captured in a CUDA graph. Pointers are device memory, except the argument structs themselves. */
#ifndef TIDE_KERNELS_H
#define TIDE_KERNELS_H

#include "tide_compact/kernel.cuh"
#include "tide_exit_scatter/kernel.cuh"
#include "tide_gather_pending/kernel.cuh"
#include "tide_route/kernel.cuh"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised when a struct or the meaning of a field changes. */
#define TIDE_KERNELS_VERSION 1

TIDE_API int32_t tide_kernels_version(void);

/* Of the build that runs on the CPU alone: the order in which it runs threads and blocks (0 = ascending, else a seed of
   a shuffle) and the compute capability it takes itself for. cudaErrorNotSupported in the build for GPUs. */
TIDE_API cudaError_t tide_kernels_emulate(uint64_t order, int32_t compute_capability_major);

#ifdef __cplusplus
}
#endif

#endif

/* The C interface of libtide_kernels, for runtimes, plugins and tests; needs no TensorRT.

   Every function starts its work on the caller's stream and returns. Functions do not allocate or wait, and can be
   captured in a CUDA graph. Pointers are device memory, except the argument structs themselves. */
#ifndef TIDE_KERNELS_H
#define TIDE_KERNELS_H

#include "tide_exit/kernel.cuh"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised when a struct or the meaning of a field changes. */
#define TIDE_KERNELS_VERSION 3

TIDE_API int32_t tide_kernels_version(void);

/* Sets, in the build for the CPU, the order of threads and blocks (0 = ascending, else the seed of a shuffle).
   cudaErrorNotSupported in the build for GPUs. */
TIDE_API cudaError_t tide_kernels_emulate(uint64_t order);

#ifdef __cplusplus
}
#endif

#endif

// Stands in for CUDA's header on a CPU: what the plugins and the kernels' host code use of the runtime.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;
struct CUevent_st;
using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;

enum cudaError_t {  // CUDA's numbers
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801,
};

enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3 };

extern "C" cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size, cudaMemcpyKind kind,
                                       cudaStream_t stream);
extern "C" cudaError_t cudaMalloc(void** memory, size_t size);
extern "C" cudaError_t cudaMemsetAsync(void* memory, int value, size_t size, cudaStream_t stream);
extern "C" cudaError_t cudaFree(void* memory);

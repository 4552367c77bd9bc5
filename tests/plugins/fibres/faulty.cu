// Kernels with one fault each, which the fibres must report: for test_kernel_barriers.py.
#include <cuda_runtime.h>

#include "common/device.cuh"

namespace {

constexpr unsigned kThreads = 32;

// Two blocks of which the second that gets a number takes what the first has written. `data` is global memory, a number for
// each thread of both; `counters`: of blocks that have begun, and that have written.
__global__ void faulty(int fault, float* data, unsigned* counters) {
  const unsigned thread = threadIdx.x;
  float* own = tide::shared_memory();
  if (thread == 0) own[2 * kThreads - 1] = static_cast<float>(atomicInc(counters, 1u));
  __syncthreads();
  const bool first = fault == 12 ? blockIdx.x == 0 : own[2 * kThreads - 1] == 0;
  own[thread] = 1;
  if (fault == 1) data[thread] = own[thread ^ 1];
  if (fault == 2 && thread < 5) __syncthreads();
  if (fault == 3) data[thread] = own[thread + kThreads];
  if (fault == 4) own[thread + 2 * kThreads] = 1;
  __syncthreads();
  if (first) {
    data[thread] = own[thread ^ 1];
    if (fault != 5) __syncthreads();
    if (thread == 0) {
      if (fault != 6) __threadfence();
      if (fault != 7) atomicAdd(counters + 1, 1u);
    }
    if (fault == 8) data[thread] = 2;
  } else {
    if (thread == 0 && fault != 9) {
      while (tide::seen(counters + 1) < 1) continue;
      if (fault != 10) __threadfence();
    }
    if (fault != 11) __syncthreads();
    data[kThreads + thread] = data[thread ^ 1];
    if (thread == 0) atomicExch(counters + 1, 0u);
  }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int start(int fault, float* data, unsigned* counters) {
  const cudaLaunchConfig_t config{dim3(2), dim3(kThreads), 2 * kThreads * sizeof(float), nullptr};
  return cudaLaunchKernelEx(&config, faulty, fault, data, counters);
}

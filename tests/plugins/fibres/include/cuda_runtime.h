// Stands in for CUDA's header on a CPU: a kernel is a function, each of its threads a fibre (fibres.h).
#pragma once

#include <cuda_runtime_api.h>

#include <tuple>

#include "fibres.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(threads, blocks)
#define __grid_constant__

using dim3 = fibres::Dim3;
static constexpr dim3& threadIdx = fibres::registers.thread;
static constexpr dim3& blockIdx = fibres::registers.block;
static constexpr dim3& gridDim = fibres::registers.grid;

inline void __syncthreads() { fibres::wait(fibres::kBlock); }
inline void __threadfence() { fibres::fence(); }
inline unsigned atomicAdd(unsigned* at, unsigned more) { return fibres::change(at, [=](unsigned old) { return old + more; }); }
inline unsigned atomicInc(unsigned* at, unsigned last) {
  return fibres::change(at, [=](unsigned old) { return old >= last ? 0 : old + 1; });
}
inline unsigned atomicExch(unsigned* at, unsigned value) { return fibres::change(at, [=](unsigned) { return value; }); }

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

namespace fibres {
cudaError_t launch(const cudaLaunchConfig_t& config, Code code);
}  // namespace fibres

template <class... Given>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Given...), Given... given) {
  struct Call {
    void (*kernel)(Given...);
    std::tuple<Given...> given;
  } call{kernel, {given...}};
  const auto run = [](void* data) { std::apply(static_cast<Call*>(data)->kernel, static_cast<Call*>(data)->given); };
  return fibres::launch(*config, {run, &call, sizeof call});
}

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
inline void cudaGridDependencySynchronize() { fibres::wait_for_kernel_before(); }

enum cudaLaunchAttributeID {
  cudaLaunchAttributeCooperative,
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeProgrammaticStreamSerialization,
};

union cudaLaunchAttributeValue {
  struct {
    unsigned x, y, z;
  } clusterDim;
  int cooperative;
  int programmaticStreamSerializationAllowed;
};

struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

struct cudaFuncAttributes {
  int ptxVersion;
};

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributeNonPortableClusterSizeAllowed };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };

cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);

namespace fibres {
cudaError_t set_attribute(const void* kernel, cudaFuncAttribute attribute, int value);
cudaError_t largest_cluster(int* size, const void* kernel);
cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, Code code);
}  // namespace fibres

template <class... Given>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, void (*)(Given...)) {
  found->ptxVersion = __CUDA_ARCH__ / 10;
  return cudaSuccess;
}

template <class... Given>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Given...), cudaFuncAttribute attribute, int value) {
  return fibres::set_attribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

template <class... Given>
cudaError_t cudaOccupancyMaxPotentialClusterSize(int* size, void (*kernel)(Given...), const cudaLaunchConfig_t*) {
  return fibres::largest_cluster(size, reinterpret_cast<const void*>(kernel));
}

template <class... Given>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Given...), Given... given) {
  struct Call {
    void (*kernel)(Given...);
    std::tuple<Given...> given;
  } call{kernel, {given...}};
  const auto run = [](void* data) { std::apply(static_cast<Call*>(data)->kernel, static_cast<Call*>(data)->given); };
  return fibres::launch(*config, reinterpret_cast<const void*>(kernel), {run, &call, sizeof call});
}

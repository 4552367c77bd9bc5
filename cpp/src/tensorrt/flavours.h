// The differences between TensorRT and TensorRT for RTX, as in tide_export/runtime/tensorrt/flavours.py. The headers in
// TENSORRT_ROOT decide which of the two a build of tide_runtime runs.
#pragma once

#include <NvInferRuntime.h>
#include <NvInferVersion.h>

#include <string>

namespace tide {

#ifdef TRT_MAJOR_RTX
constexpr char const* kFlavour = "tensorrt-rtx";
inline std::string library_file() { return "libtensorrt_rtx.so." + std::to_string(NV_TENSORRT_MAJOR); }
#else
constexpr char const* kFlavour = "tensorrt";
inline std::string library_file() { return "libnvinfer.so." + std::to_string(NV_TENSORRT_MAJOR); }
#endif

// Configures an execution context: the caller provides its working memory and records its CUDA graphs. By default
// TensorRT for RTX records graphs itself, and specializes kernels while unspecialized ones run, which a recording would
// keep; here it specializes them first.
inline void configure(nvinfer1::IRuntimeConfig& config) {
  config.setExecutionContextAllocationStrategy(nvinfer1::ExecutionContextAllocationStrategy::kUSER_MANAGED);
#ifdef TRT_MAJOR_RTX
  config.setCudaGraphStrategy(nvinfer1::CudaGraphStrategy::kDISABLED);
  config.setDynamicShapesKernelSpecializationStrategy(
      nvinfer1::DynamicShapesKernelSpecializationStrategy::kEAGER);
#endif
}

}  // namespace tide

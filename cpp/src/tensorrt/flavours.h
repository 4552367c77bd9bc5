// What differs between TensorRT and TensorRT for RTX, in one place (tide_export/runtime/tensorrt/flavours.py is its twin). The
// headers in TENSORRT_ROOT say which of the two a build of tide_runtime runs.
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

// An execution context takes working memory from the caller, and its CUDA graphs are recorded by the caller. TensorRT
// for RTX would record graphs by itself, and would finish its kernels while they are in use already: what is recorded
// then would stay the unfinished one, so it is told to finish them first.
inline void configure(nvinfer1::IRuntimeConfig& config) {
  config.setExecutionContextAllocationStrategy(nvinfer1::ExecutionContextAllocationStrategy::kUSER_MANAGED);
#ifdef TRT_MAJOR_RTX
  config.setCudaGraphStrategy(nvinfer1::CudaGraphStrategy::kDISABLED);
  config.setDynamicShapesKernelSpecializationStrategy(
      nvinfer1::DynamicShapesKernelSpecializationStrategy::kEAGER);
#endif
}

}  // namespace tide

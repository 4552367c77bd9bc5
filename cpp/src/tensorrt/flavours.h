// Describes how TensorRT and TensorRT for RTX differ, as tide_export/runtime/tensorrt/flavours.py does. The headers in
// TENSORRT_ROOT determine which of the two a build of tide_runtime runs.
#pragma once

#include <NvInferRuntime.h>
#include <NvInferVersion.h>

#include <functional>
#include <string>

#include "bundle/store.h"

namespace tide {

#ifdef TRT_MAJOR_RTX
constexpr char const* kFlavour = "tensorrt-rtx";
inline std::string library_file() { return "libtensorrt_rtx.so." + std::to_string(NV_TENSORRT_MAJOR); }
#else
constexpr char const* kFlavour = "tensorrt";
inline std::string library_file() { return "libnvinfer.so." + std::to_string(NV_TENSORRT_MAJOR); }
#endif

// Checks a plan's header before the plan is loaded, where the flavour can.
//
// data: the plan. path: for messages. last_error: returns the last one that the library logged. log: receives a
// sentence if the plan would run, but slower than one built here.
//
// Throws ProviderError: it cannot run on this machine, and why. BundleError: it is no plan, or its header is damaged.
void check_header(nvinfer1::IRuntime const& runtime, Mapping const& data, std::string const& path,
                  std::function<std::string()> const& last_error, std::function<void(std::string const&)> const& log);

// Configures an execution context: the caller provides its working memory and records its CUDA graphs. By default
// TensorRT for RTX records graphs itself, and specializes kernels while unspecialized ones run, which a recording would
// keep; here it specializes them first.
void configure(nvinfer1::IRuntimeConfig& config);

// Whether the next run of a context, whose shapes and addresses are set, may be recorded in a CUDA graph.
bool capturable(nvinfer1::IExecutionContext const& context, cudaStream_t stream);

}  // namespace tide

// Messages are those of tide_export/runtime/tensorrt/flavours.py.
#include "tensorrt/flavours.h"

#include <cstdint>
#include <utility>

#include "tensorrt/plans.h"
#include "tide/errors.h"

namespace tide {

#ifdef TRT_MAJOR_RTX

namespace {

using nvinfer1::EngineInvalidityDiagnostics;
using nvinfer1::EngineValidity;

// Why a header is refused, and what a user can do.
constexpr std::pair<EngineInvalidityDiagnostics, char const*> kRefusals[] = {
    {EngineInvalidityDiagnostics::kMALFORMED_ENGINE, "it is no plan, or a damaged one"},
    {EngineInvalidityDiagnostics::kVERSION_MISMATCH, "it was built by another version: build it again"},
    {EngineInvalidityDiagnostics::kUNSUPPORTED_CC, "it was built for other GPUs: build it again"},
    {EngineInvalidityDiagnostics::kOLD_CUDA_DRIVER, "the GPU's driver is too old for it: update the driver"},
    {EngineInvalidityDiagnostics::kOLD_CUDA_RUNTIME, "the CUDA runtime is too old for it: update CUDA"},
    {EngineInvalidityDiagnostics::kINSUFFICIENT_GPU_MEMORY, "the GPU has too little memory for it"},
    {EngineInvalidityDiagnostics::kCUDA_ERROR, "CUDA failed: is the driver that of this GPU?"}};

}  // namespace

void check_header(nvinfer1::IRuntime const& runtime, Mapping const& data, std::string const& path,
                  std::function<std::string()> const& last_error, std::function<void(std::string const&)> const& log) {
  std::uint64_t bits = 0;
  auto const size = static_cast<std::int64_t>(data.size());
  EngineValidity const validity = runtime.getEngineValidity(data.data(), size, &bits);
  if (validity == EngineValidity::kSUBOPTIMAL) {
    log("plan '" + path + "' was built for other GPUs too: built on this one, it may be faster");
  }
  if (validity != EngineValidity::kINVALID) return;
  auto const has = [bits](EngineInvalidityDiagnostics flag) { return (bits & static_cast<std::uint64_t>(flag)) != 0; };
  std::string reasons;
  for (auto const& [flag, reason] : kRefusals) {
    if (has(flag)) reasons += (reasons.empty() ? "" : "; ") + std::string(reason);
  }
  std::string const sentence = title_of(kFlavour) + " cannot run plan '" + path +
                               "': " + (reasons.empty() ? last_error() : reasons);
  if (has(EngineInvalidityDiagnostics::kMALFORMED_ENGINE)) throw BundleError(sentence);
  throw ProviderError(sentence);
}

void configure(nvinfer1::IRuntimeConfig& config) {
  config.setExecutionContextAllocationStrategy(nvinfer1::ExecutionContextAllocationStrategy::kUSER_MANAGED);
  config.setCudaGraphStrategy(nvinfer1::CudaGraphStrategy::kDISABLED);
  config.setDynamicShapesKernelSpecializationStrategy(nvinfer1::DynamicShapesKernelSpecializationStrategy::kEAGER);
}

bool capturable(nvinfer1::IExecutionContext const& context, cudaStream_t stream) {
  return context.isStreamCapturable(stream);
}

#else

void check_header(nvinfer1::IRuntime const&, Mapping const&, std::string const&,
                  std::function<std::string()> const&, std::function<void(std::string const&)> const&) {}

void configure(nvinfer1::IRuntimeConfig& config) {
  config.setExecutionContextAllocationStrategy(nvinfer1::ExecutionContextAllocationStrategy::kUSER_MANAGED);
}

bool capturable(nvinfer1::IExecutionContext const&, cudaStream_t) { return true; }

#endif

}  // namespace tide

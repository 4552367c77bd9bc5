// The segment networks on ONNX Runtime's provider for CUDA.
#include <string>

#include "onnxruntime/segments.h"
#include "segmented/backend.h"
#include "segmented/cuda.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr int kOldest = 75, kOldestBfloat16 = 80;  // compute capabilities: of CUDA 13; of its bfloat16 arithmetic

// Throws ProviderError: the GPU is older than ONNX Runtime's kernels.
void check_capability(Bundle const& bundle, int gpu) {
  int major = 0, minor = 0;
  cuda::require(cuda::functions().DeviceGetAttribute(&major, cuda::kMajor, gpu), "cudaDeviceGetAttribute");
  cuda::require(cuda::functions().DeviceGetAttribute(&minor, cuda::kMinor, gpu), "cudaDeviceGetAttribute");
  bool const bfloat16 = bundle.manifest.networks && bundle.manifest.networks->weights == "bf16";
  if (major * 10 + minor >= (bfloat16 ? kOldestBfloat16 : kOldest)) return;
  throw ProviderError("GPU " + std::to_string(gpu) + " has compute capability " + std::to_string(major) + "." +
                      std::to_string(minor) + ", and provider 'cuda' needs 7.5, with bfloat16 networks 8.0: " +
                      (bfloat16 && major * 10 + minor >= kOldest ? "export with --weights fp16" : "use provider 'cpu'"));
}

}  // namespace

bool has_gpu() { return cuda::finds_gpu(); }

std::shared_ptr<Backend> open_cuda(Bundle bundle, int gpu) {
  OrtNetworks::check(bundle, gpu);
  select_gpu(gpu);
  check_capability(bundle, gpu);
  std::shared_ptr<cuda::SharedStream> const stream = cuda::make_stream(gpu);
  auto const networks = std::make_shared<OrtNetworks>(bundle, std::nullopt, gpu, stream);
  return std::make_shared<SegmentBackend>(std::move(bundle), "cuda", networks->specs(), [=](NetworksOf part) {
    using Log = std::function<void(std::string const&)>;
    return DeviceNetworks{std::make_unique<CudaDevice>(gpu, false, Log(), stream), networks->bind(part)};
  });
}

}  // namespace tide

// The segment networks on ONNX Runtime's provider for CUDA.
#include "onnxruntime/segments.h"
#include "segmented/backend.h"
#include "segmented/cuda.h"

namespace tide {

bool has_gpu() { return cuda::finds_gpu(); }

std::shared_ptr<Backend> open_cuda(Bundle bundle, int gpu) {
  auto const networks = std::make_shared<OrtNetworks>(bundle, std::nullopt, gpu);
  select_gpu(gpu);
  return std::make_shared<SegmentBackend>(std::move(bundle), "cuda", networks->specs(), [networks, gpu](NetworksOf part) {
    auto device = std::make_unique<CudaDevice>(gpu, false);  // ONNX Runtime runs on another stream
    auto bound = networks->bind(part, device.get());
    return DeviceNetworks{std::move(device), std::move(bound)};
  });
}

}  // namespace tide

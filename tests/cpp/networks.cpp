#include "networks.h"

#include "onnxruntime/segments.h"
#include "segmented/backend.h"
#include "tensorrt/engines.h"
#include "tensorrt/plugins.h"
#ifdef TIDE_FAKE_GPU
#include "fake_cudart.h"
#include "segmented/cuda.h"
#endif

namespace {

#ifdef TIDE_FAKE_GPU
// Queues a network's runs on the stand-in's stream, as TensorRT does on a real one.
class QueuedNetwork final : public tide::Network {
 public:
  QueuedNetwork(std::unique_ptr<tide::Network> network, cudaStream_t stream)
      : network_(std::move(network)), stream_(stream) {}

  void run(std::vector<std::byte*> const& addresses, std::int64_t tokens, std::int64_t batch_size) override {
    std::pair<std::int64_t, std::int64_t> const shape(tokens, batch_size);
    if (fake_cuda_is_capturing(stream_) && last_ != shape) {
      throw std::logic_error("TensorRT requires a run between a change of shape and a recording");
    }
    last_ = shape;
    fake_cuda_enqueue(stream_, [=] { network_->run(addresses, tokens, batch_size); });
  }

 private:
  std::unique_ptr<tide::Network> const network_;
  cudaStream_t const stream_;
  std::pair<std::int64_t, std::int64_t> last_;
};

// waits: networks that wait for the device's queue and run at once, as ONNX Runtime's on CUDA do.
std::shared_ptr<tide::Backend> on_fake_gpu(tide::Bundle bundle, tide::LoadOptions const& options, bool waits) {
  auto const networks = std::make_shared<tide::OrtNetworks>(bundle, options.threads);
  int const gpu = static_cast<int>(options.device.value_or(0));
  bundle.manifest.networks->max_tokens = 64;  // so that longer steps and the head run in chunks
  bundle.manifest.networks->max_logits = 2;
  bundle.manifest.networks->max_slot_tokens = 64 / bundle.manifest.networks->max_batch_size;
  return std::make_shared<tide::SegmentBackend>(std::move(bundle), "cpu", networks->specs(), [networks, gpu, waits] {
    auto device = std::make_unique<tide::CudaDevice>(gpu, !waits);
    tide::DeviceNetworks opened;
    if (waits) {
      opened.networks = networks->bind(device.get());
      opened.device = std::move(device);
      return opened;
    }
    for (std::unique_ptr<tide::Network>& network : networks->bind()) {
      opened.networks.push_back(std::make_unique<QueuedNetwork>(std::move(network), device->stream()));
    }
    opened.device = std::move(device);
    return opened;
  });
}
#endif

}  // namespace

std::shared_ptr<tide::Backend> backend_on_networks(std::string const& device, tide::Bundle bundle,
                                                   tide::LoadOptions const& options) {
#ifdef TIDE_FAKE_GPU
  if (device == "gpu" || device == "cuda") return on_fake_gpu(std::move(bundle), options, device == "cuda");
#endif
  if (device != "host") throw std::logic_error("this driver has no device '" + device + "'");
  return tide::open_networks(std::move(bundle), options.threads);
}

tide::Engine engine_on_networks(std::string const& device, Options const& options) {
  return tide::Engine(backend_on_networks(device, tide::open_bundle(options.bundle, options.load.verify), options.load));
}

std::string limit_gpu_memory(std::int64_t bytes) {
#ifdef TIDE_FAKE_GPU
  fake_cuda_limit(static_cast<std::size_t>(bytes));
#endif
  return std::to_string(bytes);
}

std::string gpu_graphs() {
#ifdef TIDE_FAKE_GPU
  return "[" + std::to_string(fake_cuda_graphs()) + ", " + std::to_string(fake_cuda_launches()) + "]";
#else
  return "null";
#endif
}

std::string checked_machine(std::string const& bundle, std::string const& version,
                            std::vector<std::int64_t> const& device) {
  tide::check_machine(tide::open_bundle(bundle, false), version,
                      {static_cast<int>(device.at(0)), static_cast<int>(device.at(1))});
  return "null";
}

std::string picked_profiles(std::string const& bundle, std::vector<std::int64_t> const& tokens,
                            std::int64_t batch_size) {
  tide::Manifest const manifest = tide::open_bundle(bundle, false).manifest;
  std::vector<tide::NetworkSpec> const specs = tide::network_specs(manifest);
  std::string text;
  for (tide::NetworkSpec const* spec : {&specs.front(), &specs.back()}) {
    std::vector<tide::Profile> const profiles = tide::profiles_of(*spec, *manifest.engines, *manifest.networks);
    for (std::int64_t const count : tokens) {
      if (spec == &specs.back() && count > manifest.networks->max_logits) continue;
      text += (text.empty() ? "" : ", ") + std::to_string(tide::pick_profile(profiles, count, batch_size));
    }
  }
  return "[" + text + "]";
}

std::string found_plugins(std::string const& path) {
  auto const library = tide::find_plugins(path == "-" ? std::nullopt : std::optional<std::filesystem::path>(path));
  if (!library) return "null";
  return "[\"" + library->version + "\", \"" + library->tensorrt + "\", \"" + library->sha256 + "\"]";
}

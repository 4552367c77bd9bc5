#include "onnxruntime/segments.h"

#include <algorithm>

#include "names.h"
#include "onnxruntime/session.h"
#include "segmented/backend.h"
#include "formatting.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr char const* kCudaProvider = "CUDAExecutionProvider";

class OrtNetwork final : public Network {
 public:
  OrtNetwork(Ort::Session& session, NetworkSpec const& spec, Device* queue, std::optional<int> gpu)
      : session_(session),
        spec_(spec),
        queue_(queue),
        binding_(session),
        memory_(gpu ? "Cuda" : "Cpu", gpu.value_or(0)) {}

  void run(std::vector<std::byte*> const& addresses, std::int64_t tokens, std::int64_t batch_size) override {
    try {
      for (std::size_t i = 0; i < addresses.size(); ++i) {
        Tensor const& tensor = spec_.tensors[i];
        std::vector<std::int64_t> const dims = tensor.dims(tokens, batch_size);
        Ort::Value const value = Ort::Value::on(memory_, addresses[i], tensor.size(tokens, batch_size), dims.data(),
                                                dims.size(), element_type(tensor.dtype));
        if (tensor.is_input) binding_.BindInput(tensor.name.c_str(), value);
        if (!tensor.is_input) binding_.BindOutput(tensor.name.c_str(), value);
      }
      if (queue_ != nullptr) queue_->synchronize();
      session_.Run(Ort::RunOptions(), binding_);
    } catch (Ort::Exception const& error) {
      throw GenerationError("ONNX Runtime failed in " + spec_.name + ": " + first_line(error));
    }
  }

 private:
  Ort::Session& session_;
  NetworkSpec const& spec_;
  Device* const queue_;
  Ort::IoBinding binding_;
  Ort::MemoryInfo const memory_;
};

}  // namespace

struct OrtNetworks::Loaded {
  Ort::Env env{"tide"};
  std::vector<NetworkSession> sessions;
};

void OrtNetworks::check(Bundle const& bundle, std::optional<int> gpu) {
  if (!bundle.manifest.networks || (gpu && !bundle.manifest.networks->cuda)) {
    throw ProviderError("bundle " + quoted(bundle.path) + " holds no segment networks" + (gpu ? " for provider 'cuda'" : "") +
                        ": export it with --target cuda" + (gpu ? "" : ", tensorrt or tensorrt-rtx"));
  }
  if (bundle.manifest.networks->weights == "bf16" && !gpu) {
    throw ProviderError("the segment networks of bundle " + quoted(bundle.path) +
                        " are bfloat16, which ONNX Runtime does not run on the CPU");
  }
  std::vector<std::string> const providers = Ort::available_providers();
  if (gpu && std::find(providers.begin(), providers.end(), kCudaProvider) == providers.end()) {
    throw ProviderError(std::string("this ONNX Runtime has no ") + kCudaProvider +
                        ": pip install -e '.[cuda]' in the clone, or use provider 'cpu'");
  }
}

OrtNetworks::OrtNetworks(Bundle const& bundle, std::optional<std::int64_t> threads, std::optional<int> gpu)
    : gpu_(gpu) {
  check(bundle, gpu);
  specs_ = network_specs(bundle.manifest, true);
  loaded_ = std::make_shared<Loaded>();
  for (NetworkSpec const& spec : specs_) {
    std::string const file = network_file(spec.name);
    loaded_->sessions.push_back(load_network(loaded_->env, bundle, file, threads, kSegmentsWeightsFile, gpu));
    spec.check(tensors_of(loaded_->sessions.back()), bundle.file(file).path().string());
  }
}

std::vector<std::unique_ptr<Network>> OrtNetworks::bind(NetworksOf part, Device* queue) {
  std::vector<std::unique_ptr<Network>> networks;
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    if (!is_of(specs_[i], part)) continue;
    networks.push_back(std::make_unique<OrtNetwork>(loaded_->sessions[i], specs_[i], queue, gpu_));
  }
  return networks;
}

std::shared_ptr<Backend> open_networks(Bundle bundle, std::optional<std::int64_t> threads) {
  auto const networks = std::make_shared<OrtNetworks>(bundle, threads);
  return std::make_shared<SegmentBackend>(std::move(bundle), "cpu", networks->specs(), [networks](NetworksOf part) {
    return DeviceNetworks{std::make_unique<HostDevice>(), networks->bind(part)};
  });
}

}  // namespace tide

// tide_load_networks: segment networks that the caller runs, on an engine that this library does not know.
#include "capi/objects.h"
#include "capi/options.h"
#include "segmented/backend.h"
#include "segmented/cuda.h"
#include "tensorrt/plans.h"

using namespace tide::capi;

namespace {

// The caller's functions, and one set of networks that they opened.
struct Opened {
  Opened(tide_networks const& given, void* stream) : networks(given) {
    std::int64_t number = 0;
    begin_report();
    tide_status const status = networks.open(networks.context, stream, &number);
    check(reported(networks.reports, status));
    queue = number;
  }
  ~Opened() { networks.close(networks.context, queue); }
  Opened(Opened const&) = delete;
  Opened& operator=(Opened const&) = delete;

  static void check(tide_status status) {
    if (status != TIDE_OK) {
      throw tide::GenerationError(callers_sentence(status));
    }
  }

  tide_networks const networks;
  std::int64_t queue = 0;
};

class CallersNetwork final : public tide::Network {
 public:
  CallersNetwork(std::shared_ptr<Opened> opened, tide::NetworkSpec const& spec, tide::CudaDevice* device)
      : opened_(std::move(opened)), spec_(spec), device_(device) {
    for (tide::Tensor const& tensor : spec_.tensors) names_.push_back(tensor.name.c_str());
  }

  void run(std::vector<std::byte*> const& addresses, tide::RunSize const& size) override {
    bool const captured = device_ != nullptr && device_->recording();
    std::int64_t const recording = device_ == nullptr ? 0 : device_->recording_number();
    if (recording != 0 && !captured) device_->keep(std::make_shared<Recording>(opened_, recording));
    std::vector<void*> const memory(addresses.begin(), addresses.end());
    tide_networks const& networks = opened_->networks;
    begin_report();
    tide_status const returned = networks.run(networks.context, opened_->queue, spec_.name.c_str(), names_.data(),
                                              memory.data(), names_.size(), size.tokens, size.batch_size, size.keys, recording,
                                              captured ? 1 : 0);
    tide_status const status = reported(networks.reports, returned);
    if (status != TIDE_ENDED) return Opened::check(status);
    if (device_ != nullptr) {
      device_->end_recording(std::string(networks.provider) + " cannot record runs of " + spec_.name);
    }
  }

 private:
  // What the caller keeps of a recording.
  struct Recording {
    Recording(std::shared_ptr<Opened> networks, std::int64_t recording) : opened(std::move(networks)), number(recording) {}
    ~Recording() { opened->networks.forget(opened->networks.context, opened->queue, number); }
    Recording(Recording const&) = delete;
    Recording& operator=(Recording const&) = delete;

    std::shared_ptr<Opened> const opened;
    std::int64_t const number;
  };

  std::shared_ptr<Opened> const opened_;
  tide::NetworkSpec const& spec_;
  tide::CudaDevice* const device_;  // null: the host
  std::vector<char const*> names_;
};

std::shared_ptr<tide::Backend> open_callers_networks(tide::Bundle bundle, tide_networks const& given) {
  if (!bundle.manifest.networks) {
    throw tide::ProviderError("bundle '" + bundle.path.string() +
                              "' holds no segment networks: export it with --target cuda, tensorrt or tensorrt-rtx");
  }
  bool const drafter = !tide::is_flavour(given.provider) || tide::has_drafter_plan(bundle.manifest);
  auto const specs = std::make_shared<std::vector<tide::NetworkSpec>>(tide::network_specs(bundle.manifest, drafter));
  if (given.gpu >= 0) tide::select_gpu(given.gpu);
  return std::make_shared<tide::SegmentBackend>(std::move(bundle), given.provider, *specs, [specs, given](tide::NetworksOf part) {
    tide::DeviceNetworks opened;
    tide::CudaDevice* device = nullptr;
    if (given.gpu >= 0) {
      auto made = std::make_unique<tide::CudaDevice>(given.gpu, true, log());
      device = made.get();
      opened.device = std::move(made);
    } else {
      opened.device = std::make_unique<tide::HostDevice>();
    }
    auto const shared = std::make_shared<Opened>(given, device == nullptr ? nullptr : device->stream());
    for (tide::NetworkSpec const& spec : *specs) {
      if (!tide::is_of(spec, part)) continue;
      opened.networks.push_back(std::make_unique<CallersNetwork>(shared, spec, device));
    }
    return opened;
  });
}

}  // namespace

tide_status tide_load_networks(char const* bundle, char const* options, tide_networks const* networks,
                               tide_engine** engine) {
  return create(engine, [&] {
    auto const [load, tokenizers] = tide::open_options(options);
    tide::Bundle const opened = tide::open_bundle(bundle, load.verify, load.opened);
    tide::Engine const made(open_callers_networks(opened, *networks));
    return tide_engine{made, std::make_shared<tide::Text>(made, tokenizers)};
  });
}

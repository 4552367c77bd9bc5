#include "onnxruntime/segments.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>
#include <tuple>

#include "names.h"
#include "onnxruntime/session.h"
#include "segmented/backend.h"
#include "segmented/cuda.h"
#include "formatting.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr char const* kCudaProvider = "CUDAExecutionProvider";

constexpr std::int64_t kMaxRecorded = 64;  // tokens of a slot: a run over more takes longer than its launches
constexpr double kSeconds = 20;           // that recordings may take

// This thread's number; it is the owner's until the thread ends.
std::shared_ptr<std::int64_t const> const& this_thread() {
  static std::atomic<std::int64_t> threads{0};
  thread_local auto const number = std::make_shared<std::int64_t const>(++threads);
  return number;
}

}  // namespace

// Lets ONNX Runtime record runs as CUDA graphs until that has taken what it may. It keeps recordings as long as sessions.
class Recordings {
 public:
  bool open() const { return open_; }

  // Does work(number), which records.
  template <typename Work>
  void make(Work const& work) {
    auto const begin = std::chrono::steady_clock::now();
    std::size_t const before = cuda::free_bytes();
    work(++count_);
    std::size_t const after = cuda::free_bytes();
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    bytes_ += before - std::min(before, after);
    if (seconds_ < kSeconds && bytes_ < most_) return;
    std::ostringstream taken;
    taken.precision(3);
    taken << count_ << " took " << seconds_ << " s and " << (bytes_ >> 20) << " MiB, of " << kSeconds << " s and "
          << (most_ >> 20) << " MiB (environment variable " << cuda::kBudget << ")";
    stop(taken.str());
  }

  void stop(std::string const& reason) {
    open_ = false;
    std::cerr << "tide_runtime: no more runs are recorded as CUDA graphs, which makes decoding slower: " + reason + "\n";
  }

 private:
  std::size_t const most_ = cuda::recordings_budget();
  bool open_ = most_ > 0;
  int count_ = 0;
  double seconds_ = 0;
  std::size_t bytes_ = 0;
};

namespace {

class OrtNetwork final : public Network {
 public:
  // recordings: on a GPU alone.
  OrtNetwork(Ort::Session& session, NetworkSpec const& spec, std::optional<int> gpu, Recordings* recordings)
      : session_(session), spec_(spec), recordings_(recordings), memory_(gpu ? "Cuda" : "Cpu", gpu.value_or(0)) {}

  void run(std::vector<std::byte*> const& addresses, RunSize const& size) override {
    try {
      if (recordings_ == nullptr || size.tokens > kMaxRecorded) {
        Ort::IoBinding binding(session_);
        bind(binding, addresses, size);
        return execute(binding, kNone);
      }
      auto const [entry, is_new] = runs_.try_emplace({*this_thread(), size.as_tuple(), addresses}, session_);
      Bound& bound = entry->second;
      if (is_new) {
        bind(bound.binding, addresses, size);
        for (auto one = runs_.begin(); one != runs_.end();) {  // those of threads that have ended
          one = one->second.thread.expired() ? runs_.erase(one) : std::next(one);
        }
      }
      if (!is_new && bound.graph == kNone && recordings_->open()) return record(bound);
      execute(bound.binding, bound.graph);
    } catch (Ort::Exception const& error) {
      throw GenerationError("ONNX Runtime failed in " + spec_.name + ": " + first_line(error));
    }
  }

 private:
  static constexpr int kNone = -1;  // as ONNX Runtime has it

  // A run whose addresses are bound, and the number of its recording.
  struct Bound {
    explicit Bound(Ort::Session& session) : binding(session) {}
    Ort::IoBinding binding;
    int graph = kNone;
    std::weak_ptr<std::int64_t const> thread = this_thread();
  };
  // ONNX Runtime keeps recordings by thread.
  using Key = std::tuple<std::int64_t, std::tuple<std::int64_t, std::int64_t, std::int64_t>, std::vector<std::byte*>>;

  void bind(Ort::IoBinding& binding, std::vector<std::byte*> const& addresses, RunSize const& size) {
    for (std::size_t i = 0; i < addresses.size(); ++i) {
      Tensor const& tensor = spec_.tensors[i];
      std::vector<std::int64_t> const dims = tensor.dims(size);
      Ort::Value const value = Ort::Value::on(memory_, addresses[i], tensor.size(size), dims.data(),
                                              dims.size(), element_type(tensor.dtype));
      if (tensor.is_input) binding.BindInput(tensor.name.c_str(), value);
      if (!tensor.is_input) binding.BindOutput(tensor.name.c_str(), value);
    }
  }

  // Runs, or replays the recording of this number, which it makes if there is none: then it runs more than once, to the
  // same result.
  void execute(Ort::IoBinding const& binding, int graph) {
    Ort::RunOptions options;
    if (recordings_ != nullptr) {
      options.set("disable_synchronize_execution_providers", "1");  // who reads results waits for the stream
      options.set("gpu_graph_id", std::to_string(graph).c_str());
    }
    session_.Run(options, binding);
  }

  void record(Bound& bound) {
    try {
      recordings_->make([&](int number) { execute(bound.binding, bound.graph = number); });
    } catch (Ort::Exception const& error) {
      bound.graph = kNone;
      recordings_->stop("ONNX Runtime failed in " + spec_.name + ": " + first_line(error));
      execute(bound.binding, kNone);
    }
  }

  Ort::Session& session_;
  NetworkSpec const& spec_;
  Recordings* const recordings_;
  Ort::MemoryInfo const memory_;
  std::map<Key, Bound> runs_;
};

}  // namespace

struct OrtNetworks::Loaded {
  std::shared_ptr<cuda::SharedStream> stream;  // which sessions use
  Recordings recordings;
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
                        ": pip uninstall onnxruntime, then pip install -e '.[cuda]' in the clone; or use provider 'cpu'");
  }
}

OrtNetworks::OrtNetworks(Bundle const& bundle, std::optional<std::int64_t> threads, std::optional<int> gpu,
                         std::shared_ptr<cuda::SharedStream> stream)
    : gpu_(gpu) {
  check(bundle, gpu);
  specs_ = network_specs(bundle.manifest, true);
  loaded_ = std::make_shared<Loaded>();
  loaded_->stream = std::move(stream);
  for (NetworkSpec const& spec : specs_) {
    std::string const file = network_file(spec.name);
    loaded_->sessions.push_back(load(bundle, file, threads));
    spec.check(tensors_of(loaded_->sessions.back()), bundle.file(file).path().string());
  }
}

// A session of a network. On a GPU one whose runs can be recorded, if ONNX Runtime takes all of its nodes there.
NetworkSession OrtNetworks::load(Bundle const& bundle, std::string const& file, std::optional<std::int64_t> threads) {
  auto const open = [&](std::optional<OnCuda> gpu) {
    return load_network(loaded_->env, bundle, file, threads, kSegmentsWeightsFile, gpu);
  };
  if (!gpu_) return open(std::nullopt);
  OnCuda gpu{*gpu_, loaded_->stream->stream, loaded_->recordings.open()};
  std::string reason;
  try {
    if (gpu.records) return open(gpu);
  } catch (BundleError const& error) {
    reason = error.what();
  }
  gpu.records = false;
  NetworkSession session = open(gpu);
  if (!reason.empty()) loaded_->recordings.stop(reason);
  return session;
}

std::vector<std::unique_ptr<Network>> OrtNetworks::bind(NetworksOf part) {
  std::vector<std::unique_ptr<Network>> networks;
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    if (!is_of(specs_[i], part)) continue;
    networks.push_back(
        std::make_unique<OrtNetwork>(loaded_->sessions[i], specs_[i], gpu_, gpu_ ? &loaded_->recordings : nullptr));
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

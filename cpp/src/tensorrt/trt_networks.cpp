// The bundle's plans on a GPU, by TensorRT or TensorRT for RTX (`flavours.h` has the differences).
//
// A plan runs on one version of one flavour, on the GPUs it was built for. All of that is compared before the
// library reads a plan, because its own messages do not help users. The library is opened when plans are, so that
// this one loads where there is none. All execution contexts of a device have the same working memory: it runs one network
// at a time.
#include <dlfcn.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <mutex>
#include <tuple>

#include "names.h"
#include "segmented/cuda.h"
#include "tensorrt/plans.h"
#include "tensorrt/flavours.h"
#include "tensorrt/kernel_cache.h"
#include "tensorrt/plugins.h"
#include "segmented/backend.h"
#include "formatting.h"
#include "tide/errors.h"

namespace tide {
namespace {

std::string const kTitle = title_of(kFlavour);

// Keeps the library's last error message, of any thread.
class ErrorLog final : public nvinfer1::ILogger {
 public:
  void log(Severity severity, char const* text) noexcept override {
    if (severity > Severity::kERROR) return;
    try {
      std::lock_guard<std::mutex> const lock(mutex_);
      message_ = text;
      std::replace(message_.begin(), message_.end(), '\n', ' ');
    } catch (...) {  // std::bad_alloc
    }
  }
  std::string last() {
    std::lock_guard<std::mutex> const lock(mutex_);
    return message_.empty() ? "it does not say why" : message_;
  }

 private:
  std::mutex mutex_;
  std::string message_;
};

using CopiedBytes = std::int64_t();

// The flavour's library.
class Library {
 public:
  // Opens it. Throws ProviderError: it does not exist.
  Library() : handle_(dlopen(library_file().c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) {
      std::string const reason = dlerror();
      throw ProviderError(kTitle + " cannot be loaded (" + reason.substr(0, reason.find('\n')) +
                          "): install it, with its folder in LD_LIBRARY_PATH, or use provider 'cpu'");
    }
  }

  std::string version() const {
    std::string text;
    for (char const* part : {"Major", "Minor", "Patch", "Build"}) {
      std::string const function = std::string("getInferLib") + part + "Version";
      text += (text.empty() ? "" : ".") + std::to_string(symbol<std::int32_t()>(function.c_str())());
    }
    return text;
  }

  nvinfer1::IRuntime* runtime(ErrorLog& log) const {
    return static_cast<nvinfer1::IRuntime*>(
        symbol<void*(void*, std::int32_t)>("createInferRuntime_INTERNAL")(&log, NV_TENSORRT_VERSION));
  }

  // Registers the plugins with the library, if they are not registered yet. Returns what tells the bytes that they have
  // copied in this thread since it last told; null: another library's were registered before. Throws ProviderError.
  CopiedBytes* register_plugins(std::filesystem::path const& plugins) const {
    auto* const registry = symbol<nvinfer1::IPluginRegistry*()>("getPluginRegistry")();
    auto const registered = [&] { return registry->getCreator("TideExit", "1", "tide") != nullptr; };
    if (!registered()) registry->loadLibrary(plugins.c_str());
    if (!registered()) throw ProviderError(kTitle + " cannot load the plugin library " + quoted(plugins));
    void* const opened = dlopen(plugins.c_str(), RTLD_NOW | RTLD_NOLOAD);
    return opened == nullptr ? nullptr : reinterpret_cast<CopiedBytes*>(dlsym(opened, kCopiedBytes));
  }

 private:
  template <typename Function>
  Function* symbol(char const* name) const {
    void* const address = dlsym(handle_, name);
    if (address == nullptr) throw ProviderError(library_file() + " is not a library of " + kTitle + ": no " + name);
    return reinterpret_cast<Function*>(address);
  }

  void* handle_;  // never closed: its threads may still run
};

// The GPU's; {0, 0}: there is none. Throws ProviderError: its driver is too old for the CUDA runtime.
ComputeCapability compute_capability(int gpu) {
  cuda::Functions const& api = cuda::functions();
  ComputeCapability device;
  if (api.DeviceGetAttribute(&device.major, cuda::kMajor, gpu) == cuda::kSuccess &&
      api.DeviceGetAttribute(&device.minor, cuda::kMinor, gpu) == cuda::kSuccess) {
    return device;
  }
  int count = 0;
  if (api.GetDeviceCount(&count) == cuda::kSuccess && count > 0) select_gpu(gpu);  // throws
  api.GetLastError();  // clears the error
  int driver = 0, runtime = 0;  // without a driver it stays 0
  api.DriverGetVersion(&driver);
  api.RuntimeGetVersion(&runtime);
  if (driver == 0 || driver / 1000 >= runtime / 1000) return {};
  auto const shown = [](int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  };
  throw ProviderError("the CUDA runtime here is " + shown(runtime) + ", and the GPU's driver is for CUDA " +
                      shown(driver) + ": update the driver, or install an older CUDA runtime");
}

std::string dtype_of(nvinfer1::DataType type) {
  switch (type) {
    case nvinfer1::DataType::kFLOAT:
      return "float32";
    case nvinfer1::DataType::kHALF:
      return "float16";
    case nvinfer1::DataType::kBF16:
      return "bfloat16";
    case nvinfer1::DataType::kINT64:
      return "int64";
    case nvinfer1::DataType::kINT32:
      return "int32";
    default:
      return "another type";
  }
}

std::vector<std::int64_t> sizes_of(nvinfer1::Dims const& dims) { return {dims.d, dims.d + std::max(dims.nbDims, 0)}; }

nvinfer1::Dims dims_of(std::vector<std::int64_t> const& sizes) {
  nvinfer1::Dims dims{};
  dims.nbDims = static_cast<std::int32_t>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), dims.d);
  return dims;
}

// A plan, with the specification and profiles it was checked against.
struct LoadedPlan {
  NetworkSpec spec;
  std::vector<Profile> profiles;
  std::unique_ptr<nvinfer1::ICudaEngine> plan;
  std::unique_ptr<std::once_flag> copies_told = std::make_unique<std::once_flag>();
};

// Checks a plan's tensors, K/V buffers updated in place, and profiles. Throws BundleError, naming the difference.
void check_plan(LoadedPlan const& loaded, std::string const& path) {
  auto const& [spec, profiles, plan, told] = loaded;
  std::vector<Tensor> actual;
  for (std::int32_t i = 0; i < plan->getNbIOTensors(); ++i) {
    char const* const name = plan->getIOTensorName(i);
    bool const is_input = plan->getTensorIOMode(name) == nvinfer1::TensorIOMode::kINPUT;
    Tensor tensor{name, is_input, dtype_of(plan->getTensorDataType(name)), sizes_of(plan->getTensorShape(name))};
    // Every dynamic dimension is -1: it counts as the expected one.
    if (std::size_t const index = spec.index(name); index < spec.tensors.size()) {
      std::vector<std::int64_t> const& expected = spec.tensors[index].shape;
      for (std::size_t d = 0; d < tensor.shape.size() && tensor.shape.size() == expected.size(); ++d) {
        if (tensor.shape[d] == -1) tensor.shape[d] = expected[d];
      }
    }
    actual.push_back(std::move(tensor));
  }
  spec.check(actual, path);
  for (std::size_t output = 0; output < spec.tensors.size(); ++output) {
    std::size_t const input = spec.alias(output);
    if (input == output) continue;
    // Some versions list no aliases of a plan; its network was checked when it was built.
    char const* const aliased = plan->getAliasedInputTensor(spec.tensors[output].name.c_str());
    if (aliased != nullptr && *aliased != '\0' && spec.tensors[input].name != aliased) {
      throw BundleError("plan '" + path + "' does not update " + spec.tensors[input].name + " in place");
    }
  }
  auto const count = static_cast<std::size_t>(plan->getNbOptimizationProfiles());
  if (count != profiles.size()) {
    throw BundleError("plan '" + path + "' has " + std::to_string(count) + " optimization profiles, not the " +
                      std::to_string(profiles.size()) + " of its manifest");
  }
  for (std::size_t number = 0; number < count; ++number) {
    for (char const* const name : {names::kPastLengths, names::kTokenIndices, names::kKeyIndices, names::kExitStates,
                                   names::kRows, names::kLogits}) {
      std::size_t const index = spec.index(name);
      if (index == spec.tensors.size() || !spec.tensors[index].is_input) continue;
      std::vector<std::int64_t> const largest = sizes_of(plan->getProfileShape(
          name, static_cast<std::int32_t>(number), nvinfer1::OptProfileSelector::kMAX));
      if (largest == spec[name].dims({profiles[number].max_tokens, profiles[number].batch_size, spec.keys})) continue;
      throw BundleError("plan '" + path + "' takes " + name + " of [" + joined(largest, ", ") +
                        "] at most in profile " + profiles[number].name + ", unlike its manifest");
    }
  }
}

// What the plans' plugins copy because the library does not let them work in place.
struct Copies {
  CopiedBytes* take = nullptr;  // null: not known
  std::function<void(std::string const&)> log;

  // Logs once what a run of a plan copied. Call it in the thread that queued the run.
  void after_run(LoadedPlan const& plan, std::int64_t batch_size) const {
    std::int64_t const bytes = take == nullptr ? 0 : take();
    if (bytes == 0) return;
    std::call_once(*plan.copies_told, log,
                   kTitle + " does not let the plugin in " + plan.spec.name + " update " + names::kExitStates +
                       " in place: a run over " + std::to_string(batch_size) + " sequences copies " +
                       std::to_string(bytes) + " bytes");
  }
};

// One plan with its execution contexts on one device. One a profile runs what is not recorded. Runs that are recorded have one
// for each size and addresses, because a recording is of a context's state: TensorRT leaves undefined what it does once the
// context's shapes or addresses have changed. All recordings with such a run share it.
class TrtNetwork final : public Network {
 public:
  TrtNetwork(LoadedPlan const& plan, CudaDevice& device, Buffer memory, KernelCache const& kernels,
             Copies const& copies)
      : plan_(plan), device_(device), memory_(std::move(memory)), kernels_(kernels), copies_(copies) {}

  void run(std::vector<std::byte*> const& addresses, RunSize const& size) override {
    std::size_t const profile = pick_profile(plan_.profiles, size.tokens, size.batch_size);
    bool const recorded = device_.recording_number() != 0;
    Arguments const arguments{addresses, size.as_tuple()};
    std::shared_ptr<Context> context = recorded ? recorded_[arguments].lock() : contexts_[profile];
    bool const is_new = context == nullptr;
    if (is_new) context = std::make_shared<Context>(new_context(profile));
    if (is_new || !recorded) set(*context->context, addresses, size);
    if (!recorded) contexts_[profile] = context;
    if (recorded && !device_.recording()) {
      recorded_[arguments] = context;
      device_.keep(context);
    }
    if (!device_.recording() && !capturable(*context->context, stream())) {
      device_.end_recording(kTitle + " cannot record runs of " + plan_.spec.name);
    }
    require(context->context->enqueueV3(stream()), "a run over ", std::to_string(size.tokens) + " tokens");
    copies_.after_run(plan_, size.batch_size);
  }

 private:
  struct Context {
    std::unique_ptr<nvinfer1::IRuntimeConfig> config;
    std::unique_ptr<nvinfer1::IExecutionContext> context;
  };
  using Arguments = std::tuple<std::vector<std::byte*>, std::tuple<std::int64_t, std::int64_t, std::int64_t>>;

  void set(nvinfer1::IExecutionContext& execution, std::vector<std::byte*> const& addresses, RunSize const& size) const {
    std::vector<Tensor> const& tensors = plan_.spec.tensors;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      char const* const name = tensors[i].name.c_str();
      if (tensors[i].is_input) {
        require(execution.setInputShape(name, dims_of(tensors[i].dims(size))), "the shape of ", name);
      }
      require(execution.setTensorAddress(name, addresses[i]), "the address of ", name);
    }
  }

  Context new_context(std::size_t profile) const {
    Context created;
    created.config.reset(plan_.plan->createRuntimeConfig());
    require(created.config != nullptr, "a runtime configuration", "");
    configure(*created.config);
    kernels_.attach(*created.config);
    created.context.reset(plan_.plan->createExecutionContext(created.config.get()));
    require(created.context != nullptr, "an execution context", "");
    // Plans name their layers for the build's log.
    require(created.context->setNvtxVerbosity(nvinfer1::ProfilingVerbosity::kNONE), "to run without NVTX", "");
    created.context->setDeviceMemoryV2(memory_.address, static_cast<std::int64_t>(memory_.size));
    auto const number = static_cast<std::int32_t>(profile);
    bool const set = created.context->setOptimizationProfileAsync(number, stream());
    require(set, "profile ", std::to_string(profile));
    device_.synchronize();
    return created;
  }

  void require(bool worked, char const* what, std::string const& which) const {
    if (!worked) throw GenerationError(kTitle + " refused " + what + which + " in " + plan_.spec.name);
  }

  cudaStream_t stream() const { return static_cast<cudaStream_t>(device_.stream()); }

  LoadedPlan const& plan_;
  CudaDevice& device_;
  Buffer memory_;
  KernelCache const& kernels_;
  Copies const& copies_;
  std::map<std::size_t, std::shared_ptr<Context>> contexts_;  // by profile
  std::map<Arguments, std::weak_ptr<Context>> recorded_;      // which recordings keep
};

// All plans of a bundle, with the library's objects that they need.
struct Plans {
  ErrorLog log;
  int gpu = 0;
  Copies copies;
  std::unique_ptr<nvinfer1::IRuntime> runtime;
  std::vector<LoadedPlan> plans;  // in the order of `network_specs`
  std::unique_ptr<KernelCache> kernels;

  void load(NetworkSpec const& spec, Bundle const& bundle, std::function<void(std::string const&)> const& warn) {
    BundleFile const& file = bundle.file(plan_file(spec.name));
    std::filesystem::path const& path = file.path();
    std::shared_ptr<Mapping const> const data = file.map();
    LoadedPlan loaded{spec, profiles_of(spec, *bundle.manifest.engines, *bundle.manifest.networks), nullptr};
    check_header(*runtime, *data, path.string(), [this] { return log.last(); }, warn);
    loaded.plan.reset(runtime->deserializeCudaEngine(data->data(), data->size()));
    if (loaded.plan == nullptr) throw BundleError("cannot load plan " + quoted(path) + ": " + log.last());
    file.check_unchanged();
    check_plan(loaded, path.string());
    plans.push_back(std::move(loaded));
  }

  DeviceNetworks open_device(NetworksOf part) const {
    auto device = std::make_unique<CudaDevice>(gpu);
    std::size_t memory = kAlignment;  // bytes of working memory, the largest plan's
    for (LoadedPlan const& plan : plans) {
      auto const needed = static_cast<std::size_t>(plan.plan->getDeviceMemorySizeV2());
      if (is_of(plan.spec, part)) memory = std::max(memory, needed);
    }
    Buffer const working = device->allocate(memory);
    DeviceNetworks opened;
    for (LoadedPlan const& plan : plans) {
      if (!is_of(plan.spec, part)) continue;
      opened.networks.push_back(std::make_unique<TrtNetwork>(plan, *device, working, *kernels, copies));
    }
    opened.device = std::move(device);
    return opened;
  }
};

}  // namespace

std::shared_ptr<Backend> open_plans(Bundle bundle, std::string const& flavour,
                                      std::optional<std::filesystem::path> const& plugins,
                                      std::function<void(std::string const&)> const& log, int gpu) {
  check_plans(bundle, flavour);
  if (flavour != kFlavour) {
    throw ProviderError("this tide_runtime was built with " + kTitle +
                        "'s headers and runs its plans alone: build it with those of " + title_of(flavour) +
                        " in TENSORRT_ROOT, or use provider 'cpu'");
  }
  Library const library;
  std::string const version = library.version();
  check_machine(bundle, version, compute_capability(gpu));
  select_gpu(gpu);
  auto const loaded = std::make_shared<Plans>();
  loaded->gpu = gpu;
  if (bundle.manifest.engines->plugins) {
    loaded->copies = {library.register_plugins(plugins_to_load(bundle, version, plugins, log).path), log};
  }
  loaded->runtime.reset(library.runtime(loaded->log));
  if (loaded->runtime == nullptr) throw ProviderError(kTitle + " cannot be started: " + loaded->log.last());
  std::vector<NetworkSpec> specs = network_specs(bundle.manifest, has_drafter_plan(bundle.manifest));
  for (NetworkSpec const& spec : specs) loaded->load(spec, bundle, log);
  for (auto const& [name, bytes] : bundle.manifest.engines->copied) {
    log(kTitle + " copies buffers that " + name + " is to update in place: " + std::to_string(bytes) +
        " bytes in a run over one sequence");
  }
  loaded->kernels = std::make_unique<KernelCache>(*loaded->plans.front().plan, version, gpu, log);
  return std::make_shared<SegmentBackend>(std::move(bundle), flavour, std::move(specs),
                                          [loaded](NetworksOf part) { return loaded->open_device(part); });
}

}  // namespace tide

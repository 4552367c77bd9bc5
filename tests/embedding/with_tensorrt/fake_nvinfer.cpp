// A stand-in for TensorRT, or for TensorRT for RTX, by the headers it is compiled with: what cpp/src/tensorrt calls, on the
// stand-in for the CUDA runtime. Its engines are text files, which plan_files.py writes: a header, the network, a defect
// to simulate ("copies": the plugin does not work in place), the profiles' sizes and the tensors. The test runs the networks (`fake_trt_run`).
//
// It refuses what TensorRT refuses: shapes beyond the profile, addresses that are not aligned, a run before everything is
// set, a recording of a shape that has not run. What was recorded of an execution context fails once the context's shapes or
// addresses have changed, or it is gone: TensorRT leaves undefined what it does then. That of TensorRT for RTX keeps kernels in a cache, a line each; its
// engines' headers are "an engine", "a slow engine" or "an invalid engine" with the diagnostics, and FAKE_TRT_RECORDS_NOT
// in the environment refuses recordings.
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tensorrt_stubs.h"

extern "C" {
int fake_cuda_queue(void* stream, int (*work)(void*), void* context);
bool fake_cuda_is_capturing(void* stream);

// Runs a network; not 0: it failed.
int (*fake_trt_run)(char const* network, char const* const* names, void* const* addresses, std::size_t count,
                    std::int64_t tokens, std::int64_t batch_size, std::int64_t keys) = nullptr;
}

namespace {

void (*copy_by_plugin)(long bytes) = nullptr;  // of the stand-in for the plugin library

constexpr int kChanged = 720;  // no error of CUDA

constexpr std::int64_t kWorkingMemory = 4096, kAnyTokens = -1, kAnyBatch = -2, kAnyKeys = -3;

struct Description {
  bool is_input;
  DataType type;
  std::vector<std::int64_t> shape;
};

struct Sizes {
  std::int64_t tokens = 0, batch_size = 1, keys = 1;

  bool operator==(Sizes const& other) const {
    return tokens == other.tokens && batch_size == other.batch_size && keys == other.keys;
  }
};

struct Plan {
  std::string network, defect;
  std::vector<Sizes> profiles;  // at most
  std::vector<std::string> names;
  std::map<std::string, Description> tensors;
};

Plan plan_of(std::istream& text) {
  static std::map<std::string, DataType> const types = {{"float32", DataType::kFLOAT}, {"float16", DataType::kHALF},
                                                        {"int64", DataType::kINT64}, {"int32", DataType::kINT32}};
  Plan plan;
  std::getline(text, plan.network);
  std::getline(text, plan.defect);
  for (std::string line; std::getline(text, line);) {
    std::istringstream words(line);
    std::string kind, name, type;
    words >> kind;
    if (kind == "profile") {
      Sizes sizes;
      words >> sizes.tokens >> sizes.batch_size >> sizes.keys;
      plan.profiles.push_back(sizes);
      continue;
    }
    words >> name >> type;
    Description described{kind == "input", types.at(type), {}};
    for (std::int64_t size; words >> size;) described.shape.push_back(size);
    plan.names.push_back(name);
    plan.tensors[name] = described;
  }
  return plan;
}

Dims dims_of(std::vector<std::int64_t> const& sizes) {
  Dims dims{};
  dims.nbDims = static_cast<std::int32_t>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), dims.d);
  return dims;
}

#ifdef TRT_MAJOR_RTX
struct Text final : IHostMemory, apiv::VHostMemory {
  explicit Text(std::string new_text) : text(std::move(new_text)) { mImpl = this; }
  void* data() const noexcept override { return const_cast<char*>(text.data()); }
  std::size_t size() const noexcept override { return text.size(); }
  DataType type() const noexcept override { return DataType::kINT8; }
  std::string text;
};

struct FakeCache final : IRuntimeCache, StubVRuntimeCache {
  FakeCache() { mImpl = this; }
  IHostMemory* serialize() const noexcept override {
    std::lock_guard<std::mutex> const lock(mutex);
    std::string text = kVersion;
    for (std::string const& kernel : kernels) text += kernel + "\n";
    return new Text(text);
  }
  bool deserialize(void const* blob, std::size_t size) noexcept override {
    std::istringstream text(std::string(static_cast<char const*>(blob), size));
    std::string line;
    if (!std::getline(text, line) || line + "\n" != kVersion) return false;
    while (std::getline(text, line)) kernels.insert(line);
    return true;
  }
  inline static std::string const kVersion = std::to_string(NV_TENSORRT_MAJOR) + "\n";

  mutable std::mutex mutex;
  std::set<std::string> kernels;
};
#endif

struct FakeConfig final : IRuntimeConfig, StubVRuntimeConfig {
  FakeConfig() { mImpl = this; }
#ifdef TRT_MAJOR_RTX
  IRuntimeCache* createRuntimeCache() const noexcept override { return new FakeCache; }
  bool setRuntimeCache(IRuntimeCache const& new_cache) noexcept override {
    cache = const_cast<FakeCache*>(static_cast<FakeCache const*>(&new_cache));
    return true;
  }
  bool setCudaGraphStrategy(CudaGraphStrategy strategy) noexcept override {
    records_itself = strategy != CudaGraphStrategy::kDISABLED;
    return true;
  }
  void setDynamicShapesKernelSpecializationStrategy(
      DynamicShapesKernelSpecializationStrategy strategy) noexcept override {
    eager = strategy == DynamicShapesKernelSpecializationStrategy::kEAGER;
  }
  bool complete() const { return user_managed && cache != nullptr && eager && !records_itself; }
  FakeCache* cache = nullptr;
  bool records_itself = true, eager = false;
#else
  bool complete() const { return user_managed; }
#endif
  void setExecutionContextAllocationStrategy(ExecutionContextAllocationStrategy strategy) noexcept override {
    user_managed = strategy == ExecutionContextAllocationStrategy::kUSER_MANAGED;
  }
  bool user_managed = false;
};

// A queued run; recordings keep it.
struct Run {
  std::string network;
  std::map<std::string, void*> addresses;
  Sizes sizes;
  bool captured;
  std::weak_ptr<long> changes_of;  // the execution context
  long changes;
};

int run(void* context) {
  auto const& [network, addresses, sizes, captured, changes_of, changes] = *static_cast<Run const*>(context);
  if (std::shared_ptr<long> const now = changes_of.lock(); captured && (now == nullptr || *now != changes)) return kChanged;
  std::vector<char const*> names;
  std::vector<void*> places;
  for (auto const& [name, address] : addresses) {
    names.push_back(name.c_str());
    places.push_back(address);
  }
  return fake_trt_run(network.c_str(), names.data(), places.data(), names.size(), sizes.tokens, sizes.batch_size,
                      sizes.keys);
}

class FakeContext final : public IExecutionContext, StubVExecutionContext {
 public:
  FakeContext(Plan const& plan, FakeConfig& config) : plan_(plan), config_(config) { mImpl = this; }

  bool setNvtxVerbosity(ProfilingVerbosity verbosity) noexcept override {
    silent_ = verbosity == ProfilingVerbosity::kNONE;
    return true;
  }
  void setDeviceMemoryV2(void* memory, std::int64_t size) noexcept override {
    has_memory_ = memory != nullptr && size >= kWorkingMemory;
  }
  bool setOptimizationProfileAsync(std::int32_t profile, cudaStream_t) noexcept override {
    profile_ = profile;
    return true;
  }
  bool setInputShape(char const* name, Dims const& dims) noexcept override {
    if (profile_ < 0) return false;
    ++*changes_;
    Sizes const& most = plan_.profiles[static_cast<std::size_t>(profile_)];
    std::vector<std::int64_t> const& shape = plan_.tensors.at(name).shape;
    if (dims.nbDims != static_cast<std::int32_t>(shape.size())) return false;
    for (std::size_t d = 0; d < shape.size(); ++d) {
      if (shape[d] == kAnyTokens) sizes_.tokens = dims.d[d];
      if (shape[d] == kAnyBatch) sizes_.batch_size = dims.d[d];
      if (shape[d] == kAnyKeys) sizes_.keys = dims.d[d];
      if (shape[d] >= 0 && shape[d] != dims.d[d]) return false;
    }
    return sizes_.tokens <= most.tokens && sizes_.batch_size <= most.batch_size && sizes_.keys <= most.keys;
  }
  bool setTensorAddress(char const* name, void* data) noexcept override {
    ++*changes_;
    addresses_[name] = data;
    return reinterpret_cast<std::uintptr_t>(data) % 256 == 0;
  }
  bool enqueueV3(cudaStream_t stream) noexcept override {
    if (!has_memory_ || !silent_ || addresses_.size() != plan_.names.size()) return false;
    bool const captured = fake_cuda_is_capturing(stream);
    if (captured && !(last_ == sizes_)) return false;
#ifdef TRT_MAJOR_RTX
    if (captured && !isStreamCapturable(stream)) return false;
    std::lock_guard<std::mutex> const lock(config_.cache->mutex);
    config_.cache->kernels.insert(plan_.network + " " + std::to_string(profile_));
#else
    static_cast<void>(config_);
#endif
    last_ = sizes_;
    if (plan_.defect == "copies") copy_by_plugin(1000 * sizes_.batch_size);
    return fake_cuda_queue(stream, run, new Run{plan_.network, addresses_, sizes_, captured, changes_, *changes_}) == 0;
  }
#ifdef TRT_MAJOR_RTX
  bool isStreamCapturable(cudaStream_t) const noexcept override { return std::getenv("FAKE_TRT_RECORDS_NOT") == nullptr; }
#endif

 private:
  Plan const& plan_;
  FakeConfig& config_;
  bool has_memory_ = false, silent_ = false;  // without NVTX
  std::int32_t profile_ = -1;
  Sizes sizes_, last_;
  std::map<std::string, void*> addresses_;
  std::shared_ptr<long> changes_ = std::make_shared<long>(0);
};

class FakeEngine final : public ICudaEngine, StubVCudaEngine {
 public:
  explicit FakeEngine(Plan plan) : plan_(std::move(plan)) { mImpl = this; }

  std::int32_t getNbIOTensors() const noexcept override { return static_cast<std::int32_t>(plan_.names.size()); }
  char const* getIOTensorName(std::int32_t i) const noexcept override {
    return plan_.names[static_cast<std::size_t>(i)].c_str();
  }
  TensorIOMode getTensorIOMode(char const* name) const noexcept override {
    return plan_.tensors.at(name).is_input ? TensorIOMode::kINPUT : TensorIOMode::kOUTPUT;
  }
  DataType getTensorDataType(char const* name) const noexcept override {
    return plan_.defect == "types" ? DataType::kINT8 : plan_.tensors.at(name).type;
  }
  Dims getTensorShape(char const* name) const noexcept override {
    std::vector<std::int64_t> shape = plan_.tensors.at(name).shape;
    for (std::int64_t& size : shape) size = std::max<std::int64_t>(size, -1);
    return dims_of(shape);
  }
  char const* getAliasedInputTensor(char const* name) const noexcept override {
    static std::string entry;
    if (plan_.defect == "no aliases listed" || std::strncmp(name, "present.", 8) != 0) return nullptr;
    entry = std::string("past_key_values.") + (plan_.defect == "not in place" ? "0.key" : name + 8);
    return entry.c_str();
  }
  std::int32_t getNbOptimizationProfiles() const noexcept override {
    return static_cast<std::int32_t>(plan_.profiles.size());
  }
  Dims getProfileShape(char const* name, std::int32_t profile, OptProfileSelector) const noexcept override {
    std::vector<std::int64_t> shape = plan_.tensors.at(name).shape;
    Sizes const& most = plan_.profiles[static_cast<std::size_t>(profile)];
    for (std::int64_t& size : shape) {
      if (size == kAnyTokens) size = most.tokens;
      if (size == kAnyBatch) size = most.batch_size;
      if (size == kAnyKeys) size = most.keys;
    }
    return dims_of(shape);
  }
  std::int64_t getDeviceMemorySizeV2() const noexcept override { return kWorkingMemory; }
  IRuntimeConfig* createRuntimeConfig() noexcept override { return new FakeConfig; }
  IExecutionContext* createExecutionContextWithRuntimeConfig(IRuntimeConfig* config) noexcept override {
    auto& chosen = *static_cast<FakeConfig*>(config);
    return chosen.complete() ? new FakeContext(plan_, chosen) : nullptr;
  }

 private:
  Plan const plan_;
};

class FakeRuntime final : public IRuntime, StubVRuntime {
 public:
  explicit FakeRuntime(ILogger& log) : log_(log) { mImpl = this; }

  ICudaEngine* deserializeCudaEngine(void const* blob, std::size_t size) noexcept override {
    std::istringstream text(std::string(static_cast<char const*>(blob), size));
    std::string header;
    std::getline(text, header);
    if (header == "an engine" || header == "a slow engine") return new FakeEngine(plan_of(text));
    log_.log(ILogger::Severity::kINFO, "reading");
    log_.log(ILogger::Severity::kERROR, "magic tag\ndoes not match");
    return nullptr;
  }
#ifdef TRT_MAJOR_RTX
  std::int64_t getEngineHeaderSize() const noexcept override { return 64; }
  EngineValidity getEngineValidity(void const* blob, std::int64_t size,
                                   std::uint64_t* diagnostics) const noexcept override {
    std::istringstream text(std::string(static_cast<char const*>(blob), static_cast<std::size_t>(size)));
    std::string line;
    std::getline(text, line);
    *diagnostics = 0;
    if (line == "an engine") return EngineValidity::kVALID;
    if (line == "a slow engine") return EngineValidity::kSUBOPTIMAL;
    log_.log(ILogger::Severity::kERROR, "the last word");
    bool const known = line.rfind("an invalid engine ", 0) == 0;
    *diagnostics = known ? std::stoull(line.substr(18)) : static_cast<std::uint64_t>(32);
    return EngineValidity::kINVALID;
  }
#endif

 private:
  ILogger& log_;
};

// Knows the plugins when a library was loaded, but for one that is named so.
struct FakeRegistry final : StubIPluginRegistry {
  ~FakeRegistry() noexcept override = default;
  PluginLibraryHandle loadLibrary(char const* path) noexcept override {
    if (std::strstr(path, "unloved") != nullptr) return nullptr;
    loaded = true;
    copy_by_plugin = reinterpret_cast<void (*)(long)>(dlsym(dlopen(path, RTLD_NOW), "copy"));
    return nullptr;
  }
  IPluginCreatorInterface* getCreator(char const* name, char const* version, char const* space) noexcept override {
    bool const ours = std::string(name) + version + space == "TideExit1tide";
    return loaded && ours ? reinterpret_cast<IPluginCreatorInterface*>(this) : nullptr;
  }
  bool loaded = false;
};

}  // namespace

extern "C" {
std::int32_t getInferLibMajorVersion() noexcept { return NV_TENSORRT_MAJOR; }
std::int32_t getInferLibMinorVersion() noexcept { return NV_TENSORRT_MINOR; }
std::int32_t getInferLibPatchVersion() noexcept { return NV_TENSORRT_PATCH; }
std::int32_t getInferLibBuildVersion() noexcept { return NV_TENSORRT_BUILD; }
void* createInferRuntime_INTERNAL(void* log, std::int32_t version) noexcept {
  return version == NV_TENSORRT_VERSION ? new FakeRuntime(*static_cast<ILogger*>(log)) : nullptr;
}
IPluginRegistry* getPluginRegistry() noexcept {
  static FakeRegistry registry;
  return &registry;
}
}

// The functions of TensorRT, or of TensorRT for RTX, that `tensorrt/trt_networks.cpp` calls, on ONNX Runtime's CPU and the
// stand-in for the CUDA runtime: a library that is opened as libnvinfer or libtensorrt_rtx, by the headers it is built
// with. Its engines are text files: the network, its profiles' sizes, and a defect to simulate. It refuses what TensorRT
// refuses: shapes beyond the profile, a run before everything is set, a recording of a shape that has not run. That of
// TensorRT for RTX keeps kernels in a cache, a line each; its engines' headers are "an engine", "a slow engine" or "an
// invalid engine" with the diagnostics, and FAKE_TRT_RECORDS_NOT in the environment refuses recordings.
#include <cuda_runtime_api.h>
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "fake_cudart.h"
#include "tensorrt_stubs.h"

namespace {

constexpr std::int64_t kWorkingMemory = 4096;

struct Description {
  bool is_input;
  ONNXTensorElementDataType type;
  std::vector<std::int64_t> shape;  // -1: tokens, -2: rows
};

struct Sizes {
  std::int64_t tokens = 0, rows = 1;

  bool operator==(Sizes const& other) const { return tokens == other.tokens && rows == other.rows; }
};

struct Plan {
  std::string network, defect;
  std::vector<Sizes> profiles;  // maximum tokens and sequences
};

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
    std::string text = version();
    for (std::string const& kernel : kernels) text += kernel + "\n";
    return new Text(text);
  }
  bool deserialize(void const* blob, std::size_t size) noexcept override {
    std::istringstream text(std::string(static_cast<char const*>(blob), size));
    std::string line;
    if (!std::getline(text, line) || line + "\n" != version()) return false;
    while (std::getline(text, line)) kernels.insert(line);
    return true;
  }
  static std::string version() { return std::to_string(NV_TENSORRT_MAJOR) + " " + std::to_string(NV_TENSORRT_MINOR) + "\n"; }

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
  bool setCudaGraphStrategy(CudaGraphStrategy new_strategy) noexcept override {
    records_itself = new_strategy != CudaGraphStrategy::kDISABLED;
    return true;
  }
  void setDynamicShapesKernelSpecializationStrategy(
      DynamicShapesKernelSpecializationStrategy new_strategy) noexcept override {
    eager = new_strategy == DynamicShapesKernelSpecializationStrategy::kEAGER;
  }
  bool complete() const { return cache != nullptr && eager && !records_itself; }
  FakeCache* cache = nullptr;
  bool records_itself = true, eager = false;
#else
  bool complete() const { return true; }
#endif
  void setExecutionContextAllocationStrategy(ExecutionContextAllocationStrategy new_strategy) noexcept override {
    strategy = new_strategy;
  }
  ExecutionContextAllocationStrategy strategy = ExecutionContextAllocationStrategy::kSTATIC;
};

class FakeEngine;

class FakeContext final : public IExecutionContext, StubVExecutionContext {
 public:
  FakeContext(FakeEngine& engine, FakeConfig& config) : engine_(engine), config_(config) { mImpl = this; }

  void setDeviceMemoryV2(void* memory, std::int64_t size) noexcept override {
    has_memory_ = memory != nullptr && size >= kWorkingMemory;
  }
  bool setOptimizationProfileAsync(std::int32_t profile, cudaStream_t) noexcept override {
    profile_ = profile;
    return true;
  }
  bool setInputShape(char const* name, Dims const& dims) noexcept override;
  bool setTensorAddress(char const* name, void* data) noexcept override {
    addresses_[name] = data;
    return true;
  }
  bool enqueueV3(cudaStream_t stream) noexcept override;
#ifdef TRT_MAJOR_RTX
  bool isStreamCapturable(cudaStream_t) const noexcept override {
    return std::getenv("FAKE_TRT_RECORDS_NOT") == nullptr;
  }
#endif

 private:
  FakeEngine& engine_;
  FakeConfig& config_;
  bool has_memory_ = false;
  std::int32_t profile_ = -1;
  Sizes sizes_, last_;
  std::map<std::string, void*> addresses_;
};

class FakeEngine final : public ICudaEngine, StubVCudaEngine {
 public:
  FakeEngine(Ort::Env& env, Plan plan) : plan_(std::move(plan)), session_(env, plan_.network.c_str(), options()) {
    mImpl = this;
    Ort::AllocatorWithDefaultOptions allocator;
    for (bool const inputs : {true, false}) {
      for (std::size_t i = 0; i < (inputs ? session_.GetInputCount() : session_.GetOutputCount()); ++i) {
        auto const name =
            inputs ? session_.GetInputNameAllocated(i, allocator) : session_.GetOutputNameAllocated(i, allocator);
        Ort::TypeInfo const type = inputs ? session_.GetInputTypeInfo(i) : session_.GetOutputTypeInfo(i);
        auto const tensor = type.GetTensorTypeAndShapeInfo();
        Description description{inputs, tensor.GetElementType(), tensor.GetShape()};
        std::vector<char const*> symbols(description.shape.size());
        tensor.GetSymbolicDimensions(symbols.data(), symbols.size());
        for (std::size_t d = 0; d < symbols.size(); ++d) {
          if (description.shape[d] < 0) description.shape[d] = std::string(symbols[d]) == "batch" ? -2 : -1;
        }
        names_.push_back(name.get());
        tensors_[name.get()] = description;
      }
    }
  }

  std::int32_t getNbIOTensors() const noexcept override { return static_cast<std::int32_t>(names_.size()); }
  char const* getIOTensorName(std::int32_t i) const noexcept override {
    return names_[static_cast<std::size_t>(i)].c_str();
  }
  TensorIOMode getTensorIOMode(char const* name) const noexcept override {
    return tensors_.at(name).is_input ? TensorIOMode::kINPUT : TensorIOMode::kOUTPUT;
  }
  DataType getTensorDataType(char const* name) const noexcept override {
    static std::map<ONNXTensorElementDataType, DataType> const types = {
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, DataType::kFLOAT},
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, DataType::kHALF},
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, DataType::kINT64},
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, DataType::kINT32}};
    return plan_.defect == "types" ? DataType::kINT8 : types.at(tensors_.at(name).type);
  }
  Dims getTensorShape(char const* name) const noexcept override {
    std::vector<std::int64_t> shape = tensors_.at(name).shape;
    for (std::int64_t& size : shape) size = size < 0 ? -1 : size;
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
    return dims_of(shape(name, plan_.profiles[static_cast<std::size_t>(profile)]));
  }
  std::int64_t getDeviceMemorySizeV2() const noexcept override { return kWorkingMemory; }
  IRuntimeConfig* createRuntimeConfig() noexcept override { return new FakeConfig; }
  IExecutionContext* createExecutionContextWithRuntimeConfig(IRuntimeConfig* config) noexcept override {
    auto& chosen = *static_cast<FakeConfig*>(config);
    bool const complete = chosen.strategy == ExecutionContextAllocationStrategy::kUSER_MANAGED && chosen.complete();
    return complete ? new FakeContext(*this, chosen) : nullptr;
  }

  std::vector<std::int64_t> const& described(char const* name) const { return tensors_.at(name).shape; }
  std::vector<std::int64_t> shape(char const* name, Sizes const& sizes) const {
    std::vector<std::int64_t> shape = described(name);
    for (std::int64_t& size : shape) size = size == -1 ? sizes.tokens : size == -2 ? sizes.rows : size;
    return shape;
  }
  bool takes(std::int32_t profile, Sizes const& sizes) const {
    if (profile < 0) return false;
    Sizes const& most = plan_.profiles[static_cast<std::size_t>(profile)];
    return sizes.tokens <= most.tokens && sizes.rows <= most.rows;
  }
  std::vector<std::string> const& names() const { return names_; }
  std::string const& network() const { return plan_.network; }

  void run(std::map<std::string, void*> const& addresses, Sizes const& sizes) {
    Ort::MemoryInfo const place = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);
    Ort::IoBinding binding(session_);
    for (auto const& [name, tensor] : tensors_) {
      std::vector<std::int64_t> const shape = this->shape(name.c_str(), sizes);
      static std::map<ONNXTensorElementDataType, std::size_t> const bytes = {
          {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, 4},
          {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, 2},
          {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, 8},
          {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, 4}};
      std::size_t size = bytes.at(tensor.type);
      for (std::int64_t const dim : shape) size *= static_cast<std::size_t>(dim);
      Ort::Value const value =
          Ort::Value::CreateTensor(place, addresses.at(name), size, shape.data(), shape.size(), tensor.type);
      if (tensor.is_input) binding.BindInput(name.c_str(), value);
      if (!tensor.is_input) binding.BindOutput(name.c_str(), value);
    }
    session_.Run(Ort::RunOptions(), binding);
  }

 private:
  static Ort::SessionOptions options() {
    Ort::SessionOptions options;
    options.SetIntraOpNumThreads(1);
    return options;
  }
  static Dims dims_of(std::vector<std::int64_t> const& sizes) {
    Dims dims{};
    dims.nbDims = static_cast<std::int32_t>(sizes.size());
    std::copy(sizes.begin(), sizes.end(), dims.d);
    return dims;
  }

  Plan const plan_;
  Ort::Session session_;
  std::vector<std::string> names_;
  std::map<std::string, Description> tensors_;
};

bool FakeContext::setInputShape(char const* name, Dims const& dims) noexcept {
  std::vector<std::int64_t> const given(dims.d, dims.d + dims.nbDims);
  std::vector<std::int64_t> const& described = engine_.described(name);
  Sizes sizes = sizes_;
  for (std::size_t d = 0; d < std::min(given.size(), described.size()); ++d) {
    if (described[d] == -1) sizes.tokens = given[d];
    if (described[d] == -2) sizes.rows = given[d];
  }
  if (given != engine_.shape(name, sizes) || !engine_.takes(profile_, sizes)) return false;
  sizes_ = sizes;
  return true;
}

bool FakeContext::enqueueV3(cudaStream_t stream) noexcept {
  if (!has_memory_ || addresses_.size() != engine_.names().size()) return false;
  if (fake_cuda_is_capturing(stream) && !(last_ == sizes_)) return false;
#ifdef TRT_MAJOR_RTX
  if (fake_cuda_is_capturing(stream) && !isStreamCapturable(stream)) return false;
  std::lock_guard<std::mutex> const lock(config_.cache->mutex);
  std::string const name = engine_.network().substr(engine_.network().rfind('/') + 1);
  config_.cache->kernels.insert(name + " " + std::to_string(profile_));
#else
  static_cast<void>(config_);
#endif
  last_ = sizes_;
  fake_cuda_enqueue(stream, [engine = &engine_, addresses = addresses_, sizes = sizes_] {
    engine->run(addresses, sizes);
  });
  return true;
}

class FakeRuntime final : public IRuntime, StubVRuntime {
 public:
  explicit FakeRuntime(ILogger& log) : log_(log) { mImpl = this; }

  ICudaEngine* deserializeCudaEngine(void const* blob, std::size_t size) noexcept override {
    std::istringstream text(std::string(static_cast<char const*>(blob), size));
    std::string magic, network;
    Plan plan;
    std::getline(text, magic);
    std::getline(text, plan.network);
    std::getline(text, plan.defect);
    for (std::int64_t tokens, rows; text >> tokens >> rows;) plan.profiles.push_back({tokens, rows});
    if (magic != "an engine" && magic != "a slow engine") {
      log_.log(ILogger::Severity::kINFO, "reading");
      log_.log(ILogger::Severity::kERROR, "magic tag\ndoes not match");
      return nullptr;
    }
    return new FakeEngine(env_, plan);
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
    *diagnostics = known ? std::stoull(line.substr(18)) : std::uint64_t{32};
    return EngineValidity::kINVALID;
  }
#endif

 private:
  ILogger& log_;
  Ort::Env env_{ORT_LOGGING_LEVEL_FATAL, "fake"};
};

// Knows the plugins when a library was loaded.
struct FakeRegistry final : StubIPluginRegistry {
  ~FakeRegistry() noexcept override = default;
  PluginLibraryHandle loadLibrary(char const* path) noexcept override {
    if (std::strstr(path, "unloved") == nullptr) loaded = true;
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

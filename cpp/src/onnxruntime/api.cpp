#include "onnxruntime/api.h"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>
#include <optional>

#include "formatting.h"
#include "tide/errors.h"

namespace Ort {
namespace {

#ifdef __APPLE__
constexpr char const* kNames[] = {"libonnxruntime.dylib", "libonnxruntime.1.dylib"};
#else
constexpr char const* kNames[] = {"libonnxruntime.so.1", "libonnxruntime.so"};
#endif

// Before any thread runs that might read the environment: from 1.29 on official builds write an identifier into the home
// folder and send events about sessions to Microsoft, unless this is set before the first of them.
[[maybe_unused]] int const kNoTelemetry = ::setenv("ORT_DISABLE_TELEMETRY", "1", 0);

std::mutex mutex;
std::optional<std::filesystem::path> chosen;  // by the last call of `use_library`

constexpr char const* kAdvice =
    ": install it (pip install onnxruntime), or name its library in the option onnxruntime or in TIDE_ONNXRUNTIME";

// The library, and what to call it.
std::pair<void*, std::string> open_library() {
  std::lock_guard<std::mutex> const lock(mutex);
  char const* const named = std::getenv("TIDE_ONNXRUNTIME");
  std::optional<std::filesystem::path> path = chosen;
  if (!path && named != nullptr && *named != '\0') path = named;
  std::string reason;
  if (path) {
    if (void* const handle = ::dlopen(path->c_str(), RTLD_NOW | RTLD_LOCAL)) return {handle, tide::quoted(*path)};
    reason = ::dlerror();
  } else {
    for (char const* const name : kNames) {
      if (void* const handle = ::dlopen(name, RTLD_NOW | RTLD_LOCAL)) return {handle, tide::quoted(name)};
      if (reason.empty()) reason = ::dlerror();
    }
  }
  throw tide::ProviderError("ONNX Runtime cannot be opened (" + reason + ")" + kAdvice);
}

struct Library {
  Library() {
    auto const [handle, name] = open_library();
    auto const base_of = reinterpret_cast<abi::ApiBase const* (*)()>(::dlsym(handle, "OrtGetApiBase"));
    if (base_of == nullptr) throw tide::ProviderError(name + " is no library of ONNX Runtime" + kAdvice);
    base = base_of();
    abi::Function const* const table = base->GetApi(abi::kVersion);
    if (table == nullptr) {
      throw tide::ProviderError(name + " is ONNX Runtime " + base->GetVersionString() + ", which is older than 1." +
                                std::to_string(abi::kVersion) + kAdvice);
    }
    functions = std::make_unique<Functions>(table);
  }

  abi::ApiBase const* base = nullptr;
  std::unique_ptr<Functions> functions;
};

// Opened once; where that throws, the next call tries it again. It stays open, because its threads may still run.
Library const& library() {
  static Library const* const opened = new Library();
  return *opened;
}

RawAllocator* allocator() {
  RawAllocator* found = nullptr;
  require(functions().GetAllocatorWithDefaultOptions(&found));
  return found;
}

// A text that the library allocated.
std::string taken(char* text) {
  std::string copy = text;
  require(functions().AllocatorFree(allocator(), text));
  return copy;
}

}  // namespace

void use_library(std::filesystem::path const& path) {
  std::lock_guard<std::mutex> const lock(mutex);
  chosen = path;
}

Functions const& functions() { return *library().functions; }
abi::ApiBase const* api_base() { return library().base; }

void require(RawStatus* status) {
  if (status == nullptr) return;
  std::string const message = functions().GetErrorMessage(status);
  functions().ReleaseStatus(status);
  throw Exception(message);
}

std::vector<std::int64_t> Shape::dims_of(RawShape const* shape) {
  std::size_t count = 0;
  require(functions().GetDimensionsCount(shape, &count));
  std::vector<std::int64_t> dims(count);
  require(functions().GetDimensions(shape, dims.data(), count));
  return dims;
}

Value Value::on(MemoryInfo const& memory, void* data, std::size_t bytes, std::int64_t const* shape, std::size_t dims,
                ElementType type) {
  RawValue* raw = nullptr;
  require(functions().CreateTensorWithDataAsOrtValue(memory.get(), data, bytes, shape, dims, type, &raw));
  return Value(raw);
}

std::vector<std::int64_t> Value::shape() const {
  RawShape* raw = nullptr;
  require(functions().GetTensorTypeAndShape(raw_, &raw));
  return Shape(raw).dims();
}

std::size_t Value::count() const {
  std::size_t count = 1;
  for (std::int64_t const size : shape()) count *= static_cast<std::size_t>(size);
  return count;
}

void SessionOptions::add_external_initializers(std::vector<std::string> const& names,
                                               std::vector<Value> const& values) {
  std::vector<char const*> texts;
  std::vector<RawValue const*> raw;
  for (std::string const& name : names) texts.push_back(name.c_str());
  for (Value const& value : values) raw.push_back(value.get());
  require(functions().AddExternalInitializers(raw_, texts.data(), raw.data(), raw.size()));
}

void SessionOptions::run_on_cuda(int gpu, void* stream, bool records) {
  RawCuda* options = nullptr;
  require(functions().CreateCUDAProviderOptions(&options));
  std::unique_ptr<RawCuda, void (*)(RawCuda*)> const owner(
      options, [](RawCuda* owned) { functions().ReleaseCUDAProviderOptions(owned); });
  std::string const number = std::to_string(gpu), address = std::to_string(reinterpret_cast<std::uintptr_t>(stream));
  // Without has_user_compute_stream it takes the default stream.
  char const* const keys[] = {"device_id", "use_tf32", "has_user_compute_stream", "user_compute_stream", "enable_cuda_graph"};
  // TF32 rounds float32 factors to 10 bits, and it is the default.
  char const* const values[] = {number.c_str(), "0", "1", address.c_str(), records ? "1" : "0"};
  require(functions().UpdateCUDAProviderOptions(options, keys, values, 5));
  try {
    require(functions().SessionOptionsAppendExecutionProvider_CUDA_V2(raw_, options));
  } catch (Exception const& error) {  // a library that it links to is missing
    throw tide::ProviderError("ONNX Runtime cannot open its CUDA provider (" + tide::first_line(error) +
                              "): pip install -e '.[cuda]' in the clone, or put CUDA's libraries where the system finds them");
  }
}

IoBinding::IoBinding(Session& session) { require(functions().CreateIoBinding(session.get(), &raw_)); }

std::vector<Value> Session::Run(RunOptions const& options, char const* const* inputs, Value const* values,
                                std::size_t count, char const* const* outputs, std::size_t output_count) {
  std::vector<RawValue const*> given;
  for (std::size_t i = 0; i < count; ++i) given.push_back(values[i].get());
  std::vector<RawValue*> made(output_count);
  std::vector<Value> results;
  results.reserve(output_count);  // before there is something to lose
  require(functions().Run(raw_, options.get(), inputs, given.data(), count, outputs, output_count, made.data()));
  for (RawValue* const value : made) results.emplace_back(value);
  return results;
}

bool Session::metadata(char const* key, std::string& value) const {
  RawMetadata* metadata = nullptr;
  require(functions().SessionGetModelMetadata(raw_, &metadata));
  std::unique_ptr<RawMetadata, void (*)(RawMetadata*)> const owner(
      metadata, [](RawMetadata* owned) { functions().ReleaseModelMetadata(owned); });
  char* found = nullptr;
  require(functions().ModelMetadataLookupCustomMetadataMap(metadata, allocator(), key, &found));
  if (found == nullptr) return false;
  value = taken(found);
  return true;
}

std::vector<TensorInfo> Session::tensors(bool inputs) const {
  Functions const& api = functions();
  std::size_t count = 0;
  require(inputs ? api.SessionGetInputCount(raw_, &count) : api.SessionGetOutputCount(raw_, &count));
  std::vector<TensorInfo> tensors(count);
  for (std::size_t i = 0; i < count; ++i) {
    TensorInfo& tensor = tensors[i];
    char* name = nullptr;
    require(inputs ? api.SessionGetInputName(raw_, i, allocator(), &name)
                   : api.SessionGetOutputName(raw_, i, allocator(), &name));
    tensor.name = taken(name);
    RawTypeInfo* info = nullptr;
    require(inputs ? api.SessionGetInputTypeInfo(raw_, i, &info) : api.SessionGetOutputTypeInfo(raw_, i, &info));
    std::unique_ptr<RawTypeInfo, void (*)(RawTypeInfo*)> const owner(
        info, [](RawTypeInfo* owned) { functions().ReleaseTypeInfo(owned); });
    int kind = 0;
    require(api.GetOnnxTypeFromTypeInfo(info, &kind));
    tensor.is_tensor = kind == kTensor;
    if (!tensor.is_tensor) continue;
    RawShape const* shape = nullptr;
    require(api.CastTypeInfoToTensorInfo(info, &shape));
    require(api.GetTensorElementType(shape, &tensor.type));
    tensor.shape = Shape::dims_of(shape);
    std::vector<char const*> symbols(tensor.shape.size());
    require(api.GetSymbolicDimensions(shape, symbols.data(), symbols.size()));
    tensor.symbols.assign(symbols.begin(), symbols.end());
  }
  return tensors;
}

std::vector<std::string> available_providers() {
  char** names = nullptr;
  int count = 0;
  require(functions().GetAvailableProviders(&names, &count));
  std::vector<std::string> const providers(names, names + count);
  require(functions().ReleaseAvailableProviders(names, count));
  return providers;
}

}  // namespace Ort

// Wraps ONNX Runtime's C interface in objects that free themselves, under the names of its C++ interface. The library is
// opened when the first of them is created.
#pragma once

#include <filesystem>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "onnxruntime/functions.h"

namespace Ort {

// The library that a process opens, unless it has one open: none, that of the environment variable TIDE_ONNXRUNTIME, else
// libonnxruntime where the system finds it.
void use_library(std::filesystem::path const& path);

// The functions of the library, which is opened by the first call. Throws ProviderError: there is none, or it is too old.
Functions const& functions();

// The base of the library's interface, as operators take it.
abi::ApiBase const* api_base();

struct Exception : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws Exception: the call failed.
void require(RawStatus* status);

// An object of the library. `kRelease`: the member of Functions that frees it.
template <typename Raw, typename Release, Release const Functions::*kRelease>
class Owned {
 public:
  explicit Owned(Raw* raw = nullptr) : raw_(raw) {}
  Owned(Owned&& other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(raw_, other.raw_);
    return *this;
  }
  ~Owned() {
    if (raw_ != nullptr) (functions().*kRelease)(raw_);
  }

  Raw* get() const { return raw_; }
  explicit operator bool() const { return raw_ != nullptr; }

 protected:
  Raw* raw_;
};

#define TIDE_ORT_OWNED(raw, release) Owned<raw, decltype(Functions::release), &Functions::release>

// The copies of weights that operators on the CPU made in a layout of their own. Equal ones are kept once, whichever node
// or session made them: without it each loop of a looped model would have its own.
class PackedWeights : public TIDE_ORT_OWNED(RawPackedWeights, ReleasePrepackedWeightsContainer) {
 public:
  PackedWeights() { require(functions().CreatePrepackedWeightsContainer(&raw_)); }
};

// What sessions share, and must not outlive.
class Env : public TIDE_ORT_OWNED(RawEnv, ReleaseEnv) {
 public:
  explicit Env(char const* name) { require(functions().CreateEnv(kFatal, name, &raw_)); }

  RawPackedWeights* packed_weights() const { return packed_weights_.get(); }

 private:
  PackedWeights packed_weights_;
};

class MemoryInfo : public TIDE_ORT_OWNED(RawMemory, ReleaseMemoryInfo) {
 public:
  // device: "Cpu" or "Cuda".
  MemoryInfo(char const* device, int number) {
    require(functions().CreateMemoryInfo(device, kDeviceAllocator, number, kDefaultMemory, &raw_));
  }
  static MemoryInfo cpu() { return {"Cpu", 0}; }
};

class Shape : public TIDE_ORT_OWNED(RawShape, ReleaseTensorTypeAndShapeInfo) {
 public:
  using Owned::Owned;

  static std::vector<std::int64_t> dims_of(RawShape const* shape);
  std::vector<std::int64_t> dims() const { return dims_of(raw_); }
};

class Value : public TIDE_ORT_OWNED(RawValue, ReleaseValue) {
 public:
  explicit Value(std::nullptr_t) {}
  explicit Value(RawValue* raw) : Owned(raw) {}

  // On `bytes` of the caller's memory, which must outlive it.
  static Value on(MemoryInfo const& memory, void* data, std::size_t bytes, std::int64_t const* shape, std::size_t dims,
                  ElementType type);

  std::vector<std::int64_t> shape() const;
  std::size_t count() const;  // of elements

  template <typename T>
  T* data() const {
    void* data = nullptr;
    require(functions().GetTensorMutableData(raw_, &data));
    return static_cast<T*>(data);
  }
};

class RunOptions : public TIDE_ORT_OWNED(RawRunOptions, ReleaseRunOptions) {
 public:
  RunOptions() { require(functions().CreateRunOptions(&raw_)); }

  void set(char const* key, char const* value) { require(functions().AddRunConfigEntry(raw_, key, value)); }
};

class SessionOptions : public TIDE_ORT_OWNED(RawOptions, ReleaseSessionOptions) {
 public:
  SessionOptions() { require(functions().CreateSessionOptions(&raw_)); }

  void set_threads(int count) { require(functions().SetIntraOpNumThreads(raw_, count)); }
  void set_log_level(int level) { require(functions().SetSessionLogSeverityLevel(raw_, level)); }
  void set(char const* key, char const* value) { require(functions().AddSessionConfigEntry(raw_, key, value)); }
  void add_initializer(char const* name, Value const& value) {
    require(functions().AddInitializer(raw_, name, value.get()));
  }
  void add_external_initializers(std::vector<std::string> const& names, std::vector<Value> const& values);
  // stream: of CUDA, on which it runs. records: whether runs may be recorded as CUDA graphs.
  void run_on_cuda(int gpu, void* stream, bool records);
};

class Session;

class IoBinding : public TIDE_ORT_OWNED(RawBinding, ReleaseIoBinding) {
 public:
  explicit IoBinding(Session& session);

  void BindInput(char const* name, Value const& value) { require(functions().BindInput(raw_, name, value.get())); }
  void BindOutput(char const* name, Value const& value) { require(functions().BindOutput(raw_, name, value.get())); }
};

// An input or output of a session.
struct TensorInfo {
  std::string name;
  bool is_tensor = false;
  ElementType type = 0;
  std::vector<std::int64_t> shape;    // -1: it has a symbol
  std::vector<std::string> symbols;  // by dimension, empty where it has none
};

class Session : public TIDE_ORT_OWNED(RawSession, ReleaseSession) {
 public:
  explicit Session(std::nullptr_t) {}
  Session(Env const& env, void const* model, std::size_t size, SessionOptions const& options) {
    require(functions().CreateSessionFromArrayWithPrepackedWeightsContainer(env.get(), model, size, options.get(),
                                                                            env.packed_weights(), &raw_));
  }

  void Run(RunOptions const& options, IoBinding const& binding) {
    require(functions().RunWithBinding(raw_, options.get(), binding.get()));
  }
  std::vector<Value> Run(RunOptions const& options, char const* const* inputs, Value const* values, std::size_t count,
                         char const* const* outputs, std::size_t output_count);

  std::vector<TensorInfo> inputs() const { return tensors(true); }
  std::vector<TensorInfo> outputs() const { return tensors(false); }

  // A field of the model's metadata. Returns whether there is one.
  bool metadata(char const* key, std::string& value) const;

 private:
  std::vector<TensorInfo> tensors(bool inputs) const;
};

std::vector<std::string> available_providers();

}  // namespace Ort

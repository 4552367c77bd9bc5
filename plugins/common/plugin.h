// The base of the TensorRT plugins: attributes and the boilerplate of IPluginV3. No exception leaves a method that
// TensorRT calls: methods of `Plugin` that may throw are called through `guarded`, which logs the message.
#pragma once

#include <NvInfer.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "common/types.h"

namespace tide {

constexpr char const* kNamespace = "tide";
constexpr char const* kVersion = "1";

// A plugin was used incorrectly; the message says how.
class Misuse : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Writes to TensorRT's logger, if it has been set.
void log_error(char const* plugin, char const* text) noexcept;

// Returns the result of `call`; if it throws, logs the message and returns `failure`.
template <class Result, class Call>
Result guarded(char const* plugin, Result failure, Call call) noexcept {
  try {
    return call();
  } catch (std::exception const& error) {
    log_error(plugin, error.what());
  } catch (...) {
    log_error(plugin, "unknown exception");
  }
  return failure;
}

// The attributes of a node, with defaults for those it omits.
class Attributes {
 public:
  using Value = std::variant<int32_t, float, std::string>;
  struct Entry {
    std::string name;
    Value value;
  };

  explicit Attributes(std::vector<Entry> defaults) : entries_(std::move(defaults)) {}

  // Sets the values of `fields`. Throws Misuse: a name is not among the defaults, or a value is of another type.
  void take(nvinfer1::PluginFieldCollection const& fields);

  // The values as fields that point into this object.
  std::vector<nvinfer1::PluginField> fields() const;

  int32_t integer(char const* name) const { return std::get<int32_t>(find(name)); }
  float number(char const* name) const { return std::get<float>(find(name)); }
  std::string const& text(char const* name) const { return std::get<std::string>(find(name)); }

 private:
  Value const& find(char const* name) const;

  std::vector<Entry> entries_;
};

TideType tide_type(nvinfer1::DataType type);

bool is_float(nvinfer1::DataType type);

bool is_linear(nvinfer1::DynamicPluginTensorDesc const& tensor);

int64_t volume(nvinfer1::Dims const& dims);

int64_t last(nvinfer1::Dims const& dims);

// Throws Misuse with the text unless `condition`.
void require(bool condition, char const* text);

// Throws Misuse unless CUDA took the work.
void check(cudaError_t status);

// Sees to it that `output` holds what `input`, of float32, float16 or bfloat16, holds, where they are not one memory.
void carry_over(void* output, void const* input, nvinfer1::PluginTensorDesc const& desc, cudaStream_t stream);

// The bytes that `carry_over` has queued to be copied in this thread since the last call.
int64_t take_copied_bytes();

// All of IPluginV3 that is the same for each plugin. A plugin adds its shapes, types and `launch`.
class Plugin : public nvinfer1::IPluginV3,
               public nvinfer1::IPluginV3OneCore,
               public nvinfer1::IPluginV3OneBuildV2,
               public nvinfer1::IPluginV3OneRuntime {
 public:
  Plugin(char const* name, Attributes attributes);
  Plugin(Plugin const& other) : Plugin(other.name_, other.attributes_) { input_count_ = other.input_count_; }
  Plugin& operator=(Plugin const&) = delete;
  ~Plugin() override = default;

  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept final;

  nvinfer1::AsciiChar const* getPluginName() const noexcept final { return name_; }
  nvinfer1::AsciiChar const* getPluginVersion() const noexcept final { return kVersion; }
  nvinfer1::AsciiChar const* getPluginNamespace() const noexcept final { return kNamespace; }

  int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const*, int32_t input_count,
                          nvinfer1::DynamicPluginTensorDesc const*, int32_t) noexcept final {
    input_count_ = input_count;
    return 0;
  }
  int32_t getOutputDataTypes(nvinfer1::DataType* outputs, int32_t output_count, nvinfer1::DataType const* inputs,
                             int32_t input_count) const noexcept final;
  int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t input_count, nvinfer1::DimsExprs const*, int32_t,
                          nvinfer1::DimsExprs* outputs, int32_t output_count,
                          nvinfer1::IExprBuilder& builder) noexcept final;
  bool supportsFormatCombination(int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors, int32_t input_count,
                                 int32_t output_count) noexcept final;
  size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t input_count,
                          nvinfer1::DynamicPluginTensorDesc const* outputs, int32_t output_count) const noexcept final;

  int32_t onShapeChange(nvinfer1::PluginTensorDesc const*, int32_t input_count, nvinfer1::PluginTensorDesc const*,
                        int32_t) noexcept final {
    input_count_ = input_count;
    return 0;
  }
  int32_t enqueue(nvinfer1::PluginTensorDesc const* input_desc, nvinfer1::PluginTensorDesc const* output_desc,
                  void const* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept final;
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept final { return clone(); }
  nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept final { return &collection_; }

 protected:
  // What a plugin is. `launch` may throw Misuse.
  virtual bool takes_inputs(int32_t count) const = 0;
  virtual nvinfer1::DataType output_type(int32_t output, nvinfer1::DataType const* inputs) const = 0;
  virtual void output_shapes(nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs,
                             nvinfer1::IExprBuilder& builder) const = 0;
  // Whether the type of input `position` goes with those before it.
  virtual bool supports(int32_t position, nvinfer1::DynamicPluginTensorDesc const* inputs) const = 0;
  // Bytes for inputs of these dimensions or smaller.
  virtual int64_t workspace_size(nvinfer1::PluginTensorDesc const* inputs, int32_t input_count) const = 0;
  virtual void launch(nvinfer1::PluginTensorDesc const* input_desc, nvinfer1::PluginTensorDesc const* output_desc,
                      void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) const = 0;

  Attributes const attributes_;
  int32_t input_count_ = 0;  // TensorRT tells it before the first `enqueue`, and never in `enqueue`

 private:
  char const* name_;
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace tide

#include "common/plugin.h"

#include <algorithm>
#include <utility>

namespace tide {

using namespace nvinfer1;

namespace {

thread_local int64_t copied_bytes = 0;

Attributes::Value value_of(PluginField const& field, Attributes::Value const& like) {
  const bool one = field.length == 1;
  if (std::holds_alternative<std::string>(like) && field.type == PluginFieldType::kCHAR) {
    std::string text(static_cast<char const*>(field.data), static_cast<size_t>(field.length));
    return text.substr(0, text.find('\0'));
  }
  if (std::holds_alternative<float>(like) && one) {
    if (field.type == PluginFieldType::kFLOAT32) return *static_cast<float const*>(field.data);
    if (field.type == PluginFieldType::kFLOAT64) return static_cast<float>(*static_cast<double const*>(field.data));
  }
  if (std::holds_alternative<int32_t>(like) && one) {
    if (field.type == PluginFieldType::kINT32) return *static_cast<int32_t const*>(field.data);
    if (field.type == PluginFieldType::kINT64)
      return static_cast<int32_t>(*static_cast<int64_t const*>(field.data));
  }
  throw Misuse(std::string("attribute ") + field.name + " is of the wrong type");
}

PluginField field_of(Attributes::Entry const& entry) {
  char const* name = entry.name.c_str();
  if (auto const* text = std::get_if<std::string>(&entry.value))
    return {name, text->c_str(), PluginFieldType::kCHAR, static_cast<int32_t>(text->size() + 1)};
  if (auto const* number = std::get_if<float>(&entry.value)) return {name, number, PluginFieldType::kFLOAT32, 1};
  return {name, std::get_if<int32_t>(&entry.value), PluginFieldType::kINT32, 1};
}

}  // namespace

void Attributes::take(PluginFieldCollection const& fields) {
  for (int32_t i = 0; i < fields.nbFields; ++i) {
    PluginField const& field = fields.fields[i];
    auto const found =
        std::find_if(entries_.begin(), entries_.end(), [&](Entry const& entry) { return entry.name == field.name; });
    if (found == entries_.end()) throw Misuse(std::string("there is no attribute ") + field.name);
    if (field.data != nullptr) found->value = value_of(field, found->value);
  }
}

std::vector<PluginField> Attributes::fields() const {
  std::vector<PluginField> fields;
  std::transform(entries_.begin(), entries_.end(), std::back_inserter(fields), field_of);
  return fields;
}

Attributes::Value const& Attributes::find(char const* name) const {
  for (Entry const& entry : entries_)
    if (entry.name == name) return entry.value;
  throw Misuse(std::string("there is no attribute ") + name);
}

TideType tide_type(DataType type) {
  switch (type) {
    case DataType::kFLOAT: return TIDE_FLOAT32;
    case DataType::kHALF: return TIDE_FLOAT16;
    case DataType::kBF16: return TIDE_BFLOAT16;
    default: throw Misuse("an input is neither float32, float16 nor bfloat16");
  }
}

bool is_float(DataType type) {
  return type == DataType::kFLOAT || type == DataType::kHALF || type == DataType::kBF16;
}

bool is_linear(DynamicPluginTensorDesc const& tensor) { return tensor.desc.format == PluginFormat::kLINEAR; }

int64_t volume(Dims const& dims) {
  int64_t product = 1;
  for (int32_t i = 0; i < dims.nbDims; ++i) product *= dims.d[i];
  return product;
}

int64_t last(Dims const& dims) { return dims.nbDims > 0 ? dims.d[dims.nbDims - 1] : 1; }

void require(bool condition, char const* text) {
  if (!condition) throw Misuse(text);
}

void check(cudaError_t status) {
  if (status != cudaSuccess) throw Misuse("CUDA error " + std::to_string(static_cast<int>(status)));
}

void carry_over(void* output, void const* input, PluginTensorDesc const& desc, cudaStream_t stream) {
  if (output == input) return;
  const int64_t bytes = volume(desc.dims) * (desc.type == DataType::kFLOAT ? 4 : 2);
  check(cudaMemcpyAsync(output, input, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream));
  copied_bytes += bytes;
}

int64_t take_copied_bytes() { return std::exchange(copied_bytes, 0); }

Plugin::Plugin(char const* name, Attributes attributes) : attributes_(std::move(attributes)), name_(name) {
  fields_ = attributes_.fields();
  collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
}

IPluginCapability* Plugin::getCapabilityInterface(PluginCapabilityType type) noexcept {
  switch (type) {
    case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
    case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuildV2*>(this);
    case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

int32_t Plugin::getOutputDataTypes(DataType* outputs, int32_t output_count, DataType const* inputs,
                                   int32_t input_count) const noexcept {
  return guarded(name_, -1, [&] {
    require(takes_inputs(input_count), "wrong number of inputs");
    for (int32_t i = 0; i < output_count; ++i) outputs[i] = output_type(i, inputs);
    return 0;
  });
}

int32_t Plugin::getOutputShapes(DimsExprs const* inputs, int32_t input_count, DimsExprs const*, int32_t,
                                DimsExprs* outputs, int32_t, IExprBuilder& builder) noexcept {
  return guarded(name_, -1, [&] {
    require(takes_inputs(input_count), "wrong number of inputs");
    output_shapes(inputs, outputs, builder);
    return 0;
  });
}

bool Plugin::supportsFormatCombination(int32_t position, DynamicPluginTensorDesc const* tensors, int32_t input_count,
                                       int32_t) noexcept {
  return guarded(name_, false, [&] {
    if (!takes_inputs(input_count) || !is_linear(tensors[position])) return false;
    if (position < input_count) return supports(position, tensors);
    std::vector<DataType> types;
    for (int32_t i = 0; i < input_count; ++i) types.push_back(tensors[i].desc.type);
    return tensors[position].desc.type == output_type(position - input_count, types.data());
  });
}

size_t Plugin::getWorkspaceSize(DynamicPluginTensorDesc const* inputs, int32_t input_count,
                                DynamicPluginTensorDesc const*, int32_t) const noexcept {
  return guarded(name_, size_t{0}, [&] {
    std::vector<PluginTensorDesc> largest;
    for (int32_t i = 0; i < input_count; ++i) {
      largest.push_back(inputs[i].desc);
      largest.back().dims = inputs[i].max;
    }
    return static_cast<size_t>(workspace_size(largest.data(), input_count));
  });
}

int32_t Plugin::enqueue(PluginTensorDesc const* input_desc, PluginTensorDesc const* output_desc,
                        void const* const* inputs, void* const* outputs, void* workspace,
                        cudaStream_t stream) noexcept {
  return guarded(name_, -1, [&] {
    require(takes_inputs(input_count_), "wrong number of inputs");
    launch(input_desc, output_desc, inputs, outputs, workspace, stream);
    return 0;
  });
}

}  // namespace tide

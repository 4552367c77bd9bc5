// Does to a plugin what TensorRT does, from creation to `enqueue`, on the CPU: the plugin library is linked with the
// emulated kernels, and dimensions are plain numbers. For tests/plugins/test_plugin_classes.py, which loads it.
#include <NvInfer.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

using namespace nvinfer1;

extern "C" IPluginCreatorInterface* const* getCreators(int32_t& count);
extern "C" void setLoggerFinder(ILoggerFinder* finder);

// The functions of the CUDA runtime that the plugins call themselves.
extern "C" cudaError_t cudaMalloc(void** memory, size_t size) {
  *memory = ::operator new(size);
  return cudaSuccess;
}
extern "C" cudaError_t cudaMemsetAsync(void* memory, int value, size_t size, cudaStream_t) {
  std::memset(memory, value, size);
  return cudaSuccess;
}
extern "C" cudaError_t cudaFree(void* memory) {
  ::operator delete(memory);
  return cudaSuccess;
}
extern "C" cudaError_t cudaMemcpyAsync(void* target, void const* source, size_t size, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(target, source, size);
  return cudaSuccess;
}

namespace {

class Number final : public IDimensionExpr, private apiv::VDimensionExpr {
 public:
  explicit Number(int64_t value, bool size_tensor = false) : value_(value), size_tensor_(size_tensor) { mImpl = this; }

 private:
  bool isConstant() const override { return !size_tensor_; }
  int64_t getConstantValue() const override { return value_; }
  bool isSizeTensor() const override { return size_tensor_; }
  int64_t value_;
  bool size_tensor_;
};

int64_t value(IDimensionExpr const& expression) { return expression.getConstantValue(); }

class Builder final : public IExprBuilder, private apiv::VExprBuilder {
 public:
  Builder() { mImpl = this; }
  IDimensionExpr const* number(int64_t value, bool size_tensor = false) {
    return made_.emplace_back(std::make_unique<Number>(value, size_tensor)).get();
  }

 private:
  IDimensionExpr const* constant(int64_t value) override { return number(value); }
  IDimensionExpr const* operation(DimensionOperation operation, IDimensionExpr const& a,
                                  IDimensionExpr const& b) override {
    return operation == DimensionOperation::kCEIL_DIV ? number((value(a) + value(b) - 1) / value(b)) : nullptr;
  }
  IDimensionExpr const* declareSizeTensor(int32_t, IDimensionExpr const&, IDimensionExpr const& upper) override {
    return number(value(upper), true);
  }
  std::vector<std::unique_ptr<Number>> made_;
};

class Logger final : public ILogger {
 public:
  void log(Severity, AsciiChar const* text) noexcept override { last = text; }
  std::string last;
};

class Finder final : public ILoggerFinder {
 public:
  ILogger* findLogger() override { return &logger; }
  Logger logger;
};

Finder finder;
std::string problem;

struct Failure {
  std::string what;
};

void expect(bool condition, std::string const& what) {
  if (!condition) throw Failure{what + (finder.logger.last.empty() ? "" : ": " + finder.logger.last)};
}

template <class Capability>
Capability* capability(IPluginV3& plugin, PluginCapabilityType type) {
  return static_cast<Capability*>(plugin.getCapabilityInterface(type));
}

}  // namespace

extern "C" {

struct Field {
  char const* name;
  int32_t type;
  void const* data;
  int32_t length;
};

struct Tensor {
  int32_t type;
  int32_t rank;
  int64_t dims[4];
  void* data;
};

// Runs plugin `name`. First with outputs whose `data` is null: their type and dims are filled in (of a size that
// depends on data, the upper bound). Then with memory: the plugin writes it. `aliased` gets each output's input or -1.
// Gives what went wrong, or null.
char const* drive(char const* name, Field const* fields, int32_t field_count, Tensor const* inputs, int32_t input_count,
                  Tensor* outputs, int32_t output_count, int32_t* aliased) {
  try {
    setLoggerFinder(&finder);
    finder.logger.last.clear();
    int32_t count = 0;
    IPluginCreatorInterface* const* creators = getCreators(count);
    IPluginCreatorV3One* creator = nullptr;
    for (int32_t i = 0; i < count; ++i) {
      auto* candidate = static_cast<IPluginCreatorV3One*>(creators[i]);
      if (std::strcmp(candidate->getPluginName(), name) == 0) creator = candidate;
    }
    expect(creator != nullptr, "no such creator");
    std::vector<PluginField> given;
    for (int32_t i = 0; i < field_count; ++i)
      given.emplace_back(fields[i].name, fields[i].data, static_cast<PluginFieldType>(fields[i].type), fields[i].length);
    PluginFieldCollection const collection{field_count, given.data()};
    std::unique_ptr<IPluginV3> built(creator->createPlugin("node", &collection, TensorRTPhase::kBUILD));
    expect(built != nullptr, "not created");

    auto* build = capability<IPluginV3OneBuildV2>(*built, PluginCapabilityType::kBUILD);
    expect(build->getNbOutputs() == output_count, "another number of outputs");
    std::vector<DataType> in_types, out_types(static_cast<size_t>(output_count));
    std::vector<DynamicPluginTensorDesc> tensors;
    std::vector<DimsExprs> in_shapes, out_shapes(static_cast<size_t>(output_count));
    Builder builder;
    for (int32_t i = 0; i < input_count; ++i) {
      in_types.push_back(static_cast<DataType>(inputs[i].type));
      DynamicPluginTensorDesc tensor{};
      DimsExprs shape{};
      tensor.desc.type = in_types.back();
      tensor.desc.dims.nbDims = shape.nbDims = inputs[i].rank;
      for (int32_t axis = 0; axis < inputs[i].rank; ++axis) {
        tensor.desc.dims.d[axis] = inputs[i].dims[axis];
        shape.d[axis] = builder.number(inputs[i].dims[axis]);
      }
      tensor.min = tensor.max = tensor.opt = tensor.desc.dims;
      tensors.push_back(tensor);
      in_shapes.push_back(shape);
    }
    expect(build->getOutputDataTypes(out_types.data(), output_count, in_types.data(), input_count) == 0, "types");
    expect(build->getOutputShapes(in_shapes.data(), input_count, nullptr, 0, out_shapes.data(), output_count, builder) == 0,
           "shapes");
    for (int32_t i = 0; i < output_count; ++i) {
      DynamicPluginTensorDesc tensor{};
      tensor.desc.type = out_types[static_cast<size_t>(i)];
      tensor.desc.dims.nbDims = out_shapes[static_cast<size_t>(i)].nbDims;
      for (int32_t axis = 0; axis < tensor.desc.dims.nbDims; ++axis)
        tensor.desc.dims.d[axis] = value(*out_shapes[static_cast<size_t>(i)].d[axis]);
      tensor.min = tensor.max = tensor.opt = tensor.desc.dims;
      tensors.push_back(tensor);
      aliased[i] = build->getAliasedInput(i);
    }
    for (int32_t i = 0; i < input_count + output_count; ++i) {
      expect(build->supportsFormatCombination(i, tensors.data(), input_count, output_count),
             "tensor " + std::to_string(i) + " not supported");
      DynamicPluginTensorDesc const kept = tensors[static_cast<size_t>(i)];
      tensors[static_cast<size_t>(i)].desc.format = TensorFormat::kCHW32;
      expect(!build->supportsFormatCombination(i, tensors.data(), input_count, output_count), "another layout supported");
      tensors[static_cast<size_t>(i)] = kept;
    }
    DynamicPluginTensorDesc const* results = tensors.data() + input_count;
    expect(build->configurePlugin(tensors.data(), input_count, results, output_count) == 0, "not configured");
    size_t const size = build->getWorkspaceSize(tensors.data(), input_count, results, output_count);

    if (outputs[0].data == nullptr) {
      for (int32_t i = 0; i < output_count; ++i) {
        outputs[i].type = static_cast<int32_t>(results[i].desc.type);
        outputs[i].rank = results[i].desc.dims.nbDims;
        for (int32_t axis = 0; axis < outputs[i].rank; ++axis) outputs[i].dims[axis] = results[i].desc.dims.d[axis];
      }
      return nullptr;
    }

    // The engine: what the plugin serialises makes another one, of which a context gets a clone.
    auto* kept = capability<IPluginV3OneRuntime>(*built, PluginCapabilityType::kRUNTIME);
    std::unique_ptr<IPluginV3> loaded(
        creator->createPlugin("node", kept->getFieldsToSerialize(), TensorRTPhase::kRUNTIME));
    expect(loaded != nullptr, "not created from what it serialises");
    built.reset();
    std::unique_ptr<IPluginV3> copy(
        capability<IPluginV3OneRuntime>(*loaded, PluginCapabilityType::kRUNTIME)->attachToContext(nullptr));
    expect(copy != nullptr, "not cloned");
    loaded.reset();
    auto* runtime = capability<IPluginV3OneRuntime>(*copy, PluginCapabilityType::kRUNTIME);
    std::vector<PluginTensorDesc> in_desc, out_desc;
    std::vector<void const*> in_data;
    std::vector<void*> out_data;
    for (int32_t i = 0; i < input_count; ++i) {
      in_desc.push_back(tensors[static_cast<size_t>(i)].desc);
      in_data.push_back(inputs[i].data);
    }
    for (int32_t i = 0; i < output_count; ++i) {
      out_desc.push_back(results[i].desc);
      out_data.push_back(outputs[i].data);
    }
    std::vector<char> workspace(size + 256, static_cast<char>(0xFF));
    auto* aligned = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(workspace.data()) + 255) / 256 * 256);
    expect(runtime->onShapeChange(in_desc.data(), input_count, out_desc.data(), output_count) == 0, "shape change");
    expect(runtime->enqueue(in_desc.data(), out_desc.data(), in_data.data(), out_data.data(), aligned, nullptr) == 0,
           "enqueue");
    return nullptr;
  } catch (Failure const& failure) {
    problem = failure.what;
    return problem.c_str();
  }
}

}  // extern "C"

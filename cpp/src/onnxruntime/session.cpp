#include "onnxruntime/session.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <map>
#include <memory>

#include "formatting.h"
#include "onnxruntime/external_data.h"
#include "onnxruntime/operators.h"
#include "tide/errors.h"

namespace tide {
namespace {

// How long a worker thread spins for the next operator before it sleeps: tide_export/runtime/onnxruntime/session.py
// explains the choice.
constexpr char const* kSpinMicroseconds = "20";

std::map<std::string, ONNXTensorElementDataType> const kTypes = {
    {"float32", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},    {"float16", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16},
    {"bfloat16", ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16}, {"float64", ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE},
    {"int64", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},      {"int32", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
    {"int16", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16},      {"int8", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8},
    {"uint8", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},      {"bool", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL}};

Tensor tensor_of(std::string const& name, bool is_input, Ort::TypeInfo const& type) {
  Tensor tensor{name, is_input, "another type", {}};
  if (type.GetONNXType() != ONNX_TYPE_TENSOR) return tensor;
  auto const described = type.GetTensorTypeAndShapeInfo();
  for (auto const& [dtype, element] : kTypes) {
    if (element == described.GetElementType()) tensor.dtype = dtype;
  }
  tensor.shape = described.GetShape();
  std::vector<char const*> symbols(tensor.shape.size());
  described.GetSymbolicDimensions(symbols.data(), symbols.size());
  for (std::size_t d = 0; d < symbols.size(); ++d) {
    if (tensor.shape[d] < 0) tensor.shape[d] = symbols[d] == std::string("batch") ? kSequences : kTokens;
  }
  return tensor;
}

// threads: of one run, 1 or more; none: one per physical core.
Ort::SessionOptions session_options(std::optional<std::int64_t> threads) {
  Ort::SessionOptions options;
  options.SetIntraOpNumThreads(static_cast<int>(threads.value_or(0)));
  options.AddConfigEntry("session.intra_op.spin_duration_us", kSpinMicroseconds);
  // Where ONNX Runtime would look for weights that it does not get from memory: no folder, so that it finds none.
  options.AddConfigEntry("session.model_external_initializers_file_folder_path", "/dev/null");
  options.SetLogSeverityLevel(ORT_LOGGING_LEVEL_FATAL);  // errors reach the caller as exceptions
  return options;
}

}  // namespace

ReturnsFreeMemory::~ReturnsFreeMemory() {
#ifdef __GLIBC__
  ::malloc_trim(0);
#endif
}

void check_onnxruntime() {
  OrtApiBase const* const base = OrtGetApiBase();
  if (base->GetApi(ORT_API_VERSION) != nullptr) return;
  throw ProviderError(std::string("the ONNX Runtime library is version ") + base->GetVersionString() +
                      ", older than the headers that tide_runtime was compiled with: use one from 1." +
                      std::to_string(ORT_API_VERSION) + " on");
}

Ort::Session load_network(Ort::Env const& env, Bundle const& bundle, std::string const& name,
                          std::optional<std::int64_t> threads, char const* weights) {
  BundleFile const& file = bundle.file(name);
  std::string const graph = file.read();
  std::string const location = std::filesystem::path(weights).filename().string();
  Ort::SessionOptions options = session_options(threads);
  if (bundle.manifest.weights == "bf16") register_operators(options);
  std::unique_ptr<Mapping> memory;
  std::vector<std::string> names;
  std::vector<Ort::Value> values;
  auto const cpu = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);
  try {
    for (ExternalTensor const& tensor : external_tensors(graph)) {
      if (tensor.location != location) continue;
      if (!memory) memory = bundle.file(weights).map();
      std::optional<std::size_t> const size = tensor.size();
      if (!size) {
        throw BundleError(quoted(file.path()) + " keeps " + tensor.name +
                          " in another file, in a type of tensor that no bundle has");
      }
      if (tensor.offset > memory->size() || *size > memory->size() - tensor.offset) {
        throw BundleError(quoted(file.path()) + " has the tensor " + tensor.name +
                          " outside of the file of its weights");
      }
      names.push_back(tensor.name);
      values.push_back(Ort::Value::CreateTensor(cpu, memory->data() + tensor.offset, *size, tensor.shape.data(),
                                                tensor.shape.size(),
                                                static_cast<ONNXTensorElementDataType>(tensor.type)));
    }
    if (!values.empty()) options.AddExternalInitializers(names, values);
    Ort::Session session(env, graph.data(), graph.size(), options);
    if (memory) bundle.file(weights).check_unchanged();
    return session;
  } catch (Ort::Exception const& error) {
    throw BundleError("ONNX Runtime cannot load " + quoted(file.path()) + ": " + first_line(error));
  }
}

std::vector<Tensor> tensors_of(Ort::Session const& session) {
  Ort::AllocatorWithDefaultOptions allocator;
  std::vector<Tensor> tensors;
  for (std::size_t i = 0; i < session.GetInputCount(); ++i) {
    tensors.push_back(tensor_of(session.GetInputNameAllocated(i, allocator).get(), true, session.GetInputTypeInfo(i)));
  }
  for (std::size_t i = 0; i < session.GetOutputCount(); ++i) {
    tensors.push_back(
        tensor_of(session.GetOutputNameAllocated(i, allocator).get(), false, session.GetOutputTypeInfo(i)));
  }
  return tensors;
}

ONNXTensorElementDataType element_type(std::string const& dtype) { return kTypes.at(dtype); }

}  // namespace tide

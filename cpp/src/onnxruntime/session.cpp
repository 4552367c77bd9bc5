#include "onnxruntime/session.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <system_error>

#include "formatting.h"
#include "onnxruntime/external_data.h"
#include "onnxruntime/operators.h"
#include "tide/errors.h"

namespace tide {
namespace {

// How long a worker thread spins for the next operator before it sleeps: tide_export/runtime/onnxruntime/session.py
// explains the choice.
constexpr char const* kSpinMicroseconds = "20";
constexpr char const* kFloat32Matmuls = "1";  // the accuracy_level of MatMulNBits

std::map<std::string, ONNXTensorElementDataType> const kTypes = {
    {"float32", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},    {"float16", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16},
    {"bfloat16", ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16}, {"float64", ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE},
    {"int64", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},      {"int32", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
    {"int16", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16},      {"int8", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8},
    {"uint8", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},      {"bool", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL}};

// Before any thread runs that might read the environment. tide_export/runtime/onnxruntime/bindings.py explains it.
[[maybe_unused]] int const kNoTelemetry = ::setenv("ORT_DISABLE_TELEMETRY", "1", 0);

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
  // By default it would round the inputs of dequantized matrices to 8 bits.
  options.AddConfigEntry("session.qdq_matmulnbits_accuracy_level", kFloat32Matmuls);
  options.SetLogSeverityLevel(ORT_LOGGING_LEVEL_FATAL);  // errors reach the caller as exceptions
  return options;
}

// Lets a session run on CUDA.
void run_on(Ort::SessionOptions& options, int gpu) {
  OrtCUDAProviderOptionsV2* provider = nullptr;
  Ort::ThrowOnError(Ort::GetApi().CreateCUDAProviderOptions(&provider));
  std::unique_ptr<OrtCUDAProviderOptionsV2, void (*)(OrtCUDAProviderOptionsV2*)> const owner(
      provider, [](OrtCUDAProviderOptionsV2* owned) { Ort::GetApi().ReleaseCUDAProviderOptions(owned); });
  std::string const number = std::to_string(gpu);
  char const *const key = "device_id", *const value = number.c_str();
  Ort::ThrowOnError(Ort::GetApi().UpdateCUDAProviderOptions(provider, &key, &value, 1));
  options.AppendExecutionProvider_CUDA_V2(*provider);
}

// A folder with an empty file: ONNX Runtime insists on the file of weights that it is given from memory.
class EmptyFile {
 public:
  explicit EmptyFile(std::string const& name) {
    folder_ = (std::filesystem::temp_directory_path() / "tide-XXXXXX").string();
    if (::mkdtemp(folder_.data()) == nullptr) throw std::filesystem::filesystem_error(folder_, std::error_code());
    std::ofstream(std::filesystem::path(folder_) / name);
  }
  ~EmptyFile() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  EmptyFile(EmptyFile const&) = delete;
  EmptyFile& operator=(EmptyFile const&) = delete;

  std::string const& folder() const { return folder_; }

 private:
  std::string folder_;
};

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

NetworkSession load_network(Ort::Env const& env, Bundle const& bundle, std::string const& name,
                            std::optional<std::int64_t> threads, char const* weights, std::optional<int> gpu) {
  BundleFile const& file = bundle.file(name);
  std::string const graph = file.read();
  std::string const location = std::filesystem::path(weights).filename().string();
  SharedWeights shared;
  std::vector<std::string> names;
  auto const cpu = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);
  // folder: where ONNX Runtime would look for weights that it is not given.
  auto const opened = [&](std::string const& folder, bool shares) {
    Ort::SessionOptions options = session_options(threads);
    options.AddConfigEntry("session.model_external_initializers_file_folder_path", folder.c_str());
    register_operators(options);
    if (gpu) run_on(options, *gpu);
    for (std::size_t i = 0; shares && i < names.size(); ++i) options.AddInitializer(names[i].c_str(), shared.weights[i]);
    if (!shares && !names.empty()) options.AddExternalInitializers(names, shared.weights);
    return Ort::Session(env, graph.data(), graph.size(), options);
  };
  try {
    for (ExternalTensor const& tensor : external_tensors(graph)) {
      if (tensor.location != location) continue;
      if (!shared.memory) shared.memory = bundle.file(weights).map();
      std::optional<std::size_t> const size = tensor.size();
      if (!size) {
        throw BundleError(quoted(file.path()) + " keeps " + tensor.name +
                          " in another file, in a type of tensor that no bundle has");
      }
      if (tensor.offset > shared.memory->size() || *size > shared.memory->size() - tensor.offset) {
        throw BundleError(quoted(file.path()) + " has the tensor " + tensor.name +
                          " outside of the file of its weights");
      }
      names.push_back(tensor.name);
      shared.weights.push_back(Ort::Value::CreateTensor(cpu, shared.memory->data() + tensor.offset, *size,
                                                        tensor.shape.data(), tensor.shape.size(),
                                                        static_cast<ONNXTensorElementDataType>(tensor.type)));
    }
    Ort::Session session(nullptr);
    if (shared.memory && !gpu) {
      try {
        session = opened(EmptyFile(location).folder(), true);
      } catch (std::exception const&) {  // it computes something from a weight while it loads, and reads the empty file
      }
    }
    bool const shares = session;
    if (!shares) session = opened("/dev/null", false);
    if (shared.memory) {
      bundle.file(weights).check_unchanged();
      shared.memory->forget_pages();  // of weights that were packed; others are mapped again
    }
    return NetworkSession(shares ? std::move(shared) : SharedWeights(), std::move(session));
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

#include "onnxruntime/session.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <memory>

#include "formatting.h"
#include "onnxruntime/external_data.h"
#include "tide/errors.h"

namespace tide {
namespace {

// How long a worker thread spins for the next operator before it sleeps: tide_export/runtime/onnxruntime/session.py
// explains the choice.
constexpr char const* kSpinMicroseconds = "20";

TensorTypes tensors_of(Ort::Session const& session, bool inputs) {
  TensorTypes tensors;
  for_each_tensor(session, inputs, [&](std::string const& name, Ort::TypeInfo const& type) {
    tensors[name] = type.GetONNXType() == ONNX_TYPE_TENSOR ? type.GetTensorTypeAndShapeInfo().GetElementType()
                                                           : ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  });
  return tensors;
}

void compare(TensorTypes const& expected, TensorTypes const& actual, std::string const& kind,
             std::string const& network) {
  for (auto const& [name, type] : expected) {
    auto const tensor = actual.find(name);
    if (tensor == actual.end()) {
      throw BundleError(network + " has no " + kind + " " + name + ", which its manifest calls for");
    }
    if (tensor->second != type) throw BundleError(network + " has the " + kind + " " + name + " in another type");
  }
  for (auto const& [name, type] : actual) {
    if (expected.count(name) == 0) {
      throw BundleError(network + " has the " + kind + " " + name + ", which its manifest does not know");
    }
  }
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

Ort::Session open_network(Ort::Env const& env, Bundle const& bundle, std::string const& name,
                          std::optional<std::int64_t> threads, TensorTypes const& inputs, TensorTypes const& outputs) {
  Ort::Session session = load_network(env, bundle, name, threads);
  std::string const network = quoted(bundle.file(name).path());
  compare(inputs, tensors_of(session, true), "input", network);
  compare(outputs, tensors_of(session, false), "output", network);
  return session;
}

}  // namespace tide

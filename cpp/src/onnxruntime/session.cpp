#include "onnxruntime/session.h"

#include "formatting.h"
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

}  // namespace

void check_onnxruntime() {
  OrtApiBase const* const base = OrtGetApiBase();
  if (base->GetApi(ORT_API_VERSION) != nullptr) return;
  throw ProviderError(std::string("the ONNX Runtime library is version ") + base->GetVersionString() +
                      ", older than the headers that tide_runtime was compiled with: use one from 1." +
                      std::to_string(ORT_API_VERSION) + " on");
}

Ort::SessionOptions session_options(std::optional<std::int64_t> threads) {
  Ort::SessionOptions options;
  options.SetIntraOpNumThreads(static_cast<int>(threads.value_or(0)));
  options.AddConfigEntry("session.intra_op.spin_duration_us", kSpinMicroseconds);
  options.SetLogSeverityLevel(ORT_LOGGING_LEVEL_FATAL);  // errors reach the caller as exceptions
  return options;
}

Ort::Session open_network(Ort::Env const& env, std::filesystem::path const& file, Ort::SessionOptions const& options,
                          TensorTypes const& inputs, TensorTypes const& outputs) {
  std::string const network = quoted(file);
  try {
    Ort::Session session(env, file.c_str(), options);
    compare(inputs, tensors_of(session, true), "input", network);
    compare(outputs, tensors_of(session, false), "output", network);
    return session;
  } catch (Ort::Exception const& error) {
    throw BundleError("ONNX Runtime cannot load " + network + ": " + first_line(error));
  }
}

}  // namespace tide

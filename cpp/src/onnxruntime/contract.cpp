#include "onnxruntime/contract.h"

#include "formatting.h"
#include "tide/errors.h"

namespace tide {
namespace {

TensorTypes tensors_of(Ort::Session const& session, bool inputs) {
  Ort::AllocatorWithDefaultOptions allocator;
  TensorTypes tensors;
  std::size_t const count = inputs ? session.GetInputCount() : session.GetOutputCount();
  for (std::size_t i = 0; i < count; ++i) {
    auto const name =
        inputs ? session.GetInputNameAllocated(i, allocator) : session.GetOutputNameAllocated(i, allocator);
    Ort::TypeInfo const type = inputs ? session.GetInputTypeInfo(i) : session.GetOutputTypeInfo(i);
    tensors[name.get()] = type.GetONNXType() == ONNX_TYPE_TENSOR ? type.GetTensorTypeAndShapeInfo().GetElementType()
                                                                 : ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  }
  return tensors;
}

void compare(TensorTypes const& expected, TensorTypes const& found, std::string const& kind,
             std::string const& network) {
  for (auto const& [name, type] : expected) {
    auto const place = found.find(name);
    if (place == found.end()) {
      throw BundleError(network + " has no " + kind + " " + name + ", which its manifest calls for");
    }
    if (place->second != type) throw BundleError(network + " has the " + kind + " " + name + " in another type");
  }
  for (auto const& [name, type] : found) {
    if (expected.count(name) == 0) {
      throw BundleError(network + " has the " + kind + " " + name + ", which its manifest does not know");
    }
  }
}

}  // namespace

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

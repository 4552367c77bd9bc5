#include "graph_session.h"

#include <map>

#include "names.h"
#include "onnxruntime.h"
#include "text.h"
#include "tide/errors.h"

namespace tide {
namespace {

using Tensors = std::map<std::string, ONNXTensorElementDataType>;

Tensors graph_inputs(Manifest const& manifest) {
  Tensors tensors = {{names::kInputIds, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},
                     {names::kTotalLength, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
                     {names::kKeptTokens, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64}};
  auto const expect = [&](std::string const& name) { tensors[name] = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; };
  if (!manifest.checkpoints.empty()) expect(names::kThresholds);
  for (std::size_t k = 1; k <= manifest.checkpoints.size(); ++k) {
    expect(names::skip_threshold(k));
    if (!manifest.propagates()) expect(names::pending(k));
  }
  for (std::size_t layer = 0; layer < manifest.model.kv_shapes.size(); ++layer) {
    for (char const* kind : {"key", "value"}) expect(names::past(layer, kind));
  }
  return tensors;
}

Tensors graph_outputs(Manifest const& manifest) {
  Tensors tensors;
  auto const expect = [&](std::string const& name) { tensors[name] = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; };
  expect(names::kLogits);
  if (!manifest.checkpoints.empty()) expect(names::kScores);
  if (!manifest.checkpoints.empty() && !manifest.propagates()) expect(names::kNewPending);
  for (std::size_t layer = 0; layer < manifest.model.kv_shapes.size(); ++layer) {
    for (char const* kind : {"key", "value"}) expect(names::present(layer, kind));
  }
  return tensors;
}

Tensors found(Ort::Session& session, bool inputs) {
  Ort::AllocatorWithDefaultOptions allocator;
  Tensors tensors;
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

// Buffers are bound by name, raw type and shape: a graph that is not the manifest's must not get that far.
void check_contract(Tensors const& expected, Tensors const& found, std::string const& kind, std::string const& graph) {
  for (auto const& [name, type] : expected) {
    auto const place = found.find(name);
    if (place == found.end()) {
      throw BundleError(graph + " has no " + kind + " " + name + ", which its manifest calls for");
    }
    if (place->second != type) throw BundleError(graph + " has the " + kind + " " + name + " in another type");
  }
  for (auto const& [name, type] : found) {
    if (expected.count(name) == 0) {
      throw BundleError(graph + " has the " + kind + " " + name + ", which its manifest does not know");
    }
  }
}

}  // namespace

GraphSession::GraphSession(Bundle given, std::optional<std::int64_t> threads) : Session(std::move(given)) {
  check_onnxruntime();
  std::filesystem::path const file = bundle().path / kGraphFile;
  std::string const graph = quoted(file);
  try {
    env_ = Ort::Env(ORT_LOGGING_LEVEL_FATAL, "tide");
    session_ = Ort::Session(env_, file.c_str(), session_options(threads));
    check_contract(graph_inputs(manifest()), found(session_, true), "input", graph);
    check_contract(graph_outputs(manifest()), found(session_, false), "output", graph);
  } catch (Ort::Exception const& error) {
    throw BundleError("ONNX Runtime cannot load " + graph + ": " + first_line(error));
  }
}

}  // namespace tide

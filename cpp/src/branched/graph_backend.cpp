#include "branched/graph_backend.h"

#include "onnxruntime/contract.h"
#include "names.h"
#include "onnxruntime/session.h"
#include "tide/errors.h"

namespace tide {
namespace {

TensorTypes graph_inputs(Manifest const& manifest) {
  TensorTypes tensors = {{names::kInputIds, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},
                         {names::kTotalLength, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
                         {names::kLogitsPositions, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64}};
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

TensorTypes graph_outputs(Manifest const& manifest) {
  TensorTypes tensors;
  auto const expect = [&](std::string const& name) { tensors[name] = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; };
  expect(names::kLogits);
  if (!manifest.checkpoints.empty()) expect(names::kScores);
  if (!manifest.checkpoints.empty() && !manifest.propagates()) expect(names::kNewPending);
  for (std::size_t layer = 0; layer < manifest.model.kv_shapes.size(); ++layer) {
    for (char const* kind : {"key", "value"}) expect(names::present(layer, kind));
  }
  return tensors;
}

}  // namespace

GraphSession::GraphSession(Bundle given, std::optional<std::int64_t> threads)
    : Session(std::move(given)), batch_networks_(bundle(), threads) {
  check_onnxruntime();
  env_ = Ort::Env(ORT_LOGGING_LEVEL_FATAL, "tide");
  session_ = open_network(env_, bundle().path / kGraphFile, session_options(threads), graph_inputs(manifest()),
                          graph_outputs(manifest()));
}

}  // namespace tide

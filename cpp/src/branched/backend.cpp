#include "branched/backend.h"

#include "names.h"
#include "onnxruntime/session.h"

namespace tide {
namespace {

// Adds the K/V buffers of all layers, with the names `name` gives them as inputs or outputs.
void add_caches(TensorTypes& tensors, Manifest const& manifest,
                std::string (*name)(std::size_t layer, char const* kind)) {
  for (std::size_t layer = 0; layer < manifest.model.kv_shapes.size(); ++layer) {
    for (char const* kind : names::kKinds) tensors[name(layer, kind)] = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
}

TensorTypes graph_inputs(Manifest const& manifest) {
  TensorTypes tensors = {{names::kInputIds, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},
                         {names::kTotalLength, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
                         {names::kLogitsPositions, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64}};
  if (!manifest.checkpoints.empty()) tensors[names::kThresholds] = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  for (std::size_t k = 1; k <= manifest.checkpoints.size(); ++k) {
    tensors[names::skip_threshold(k)] = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    if (!manifest.propagates()) tensors[names::pending(k)] = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  add_caches(tensors, manifest, names::past);
  return tensors;
}

TensorTypes graph_outputs(Manifest const& manifest) {
  TensorTypes tensors = {{names::kLogits, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}};
  if (!manifest.checkpoints.empty()) {
    tensors[names::kScores] = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    if (!manifest.propagates()) tensors[names::kNewPending] = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  add_caches(tensors, manifest, names::present);
  return tensors;
}

}  // namespace

BranchedBackend::BranchedBackend(Bundle opened, std::optional<std::int64_t> threads)
    : Backend(std::move(opened)), batch_networks_(bundle(), threads) {
  check_onnxruntime();
  env_ = Ort::Env(ORT_LOGGING_LEVEL_FATAL, "tide");
  session_ = open_network(env_, bundle(), kGraphFile, threads, graph_inputs(manifest()), graph_outputs(manifest()));
}

}  // namespace tide

#include "packed/networks.h"

#include <algorithm>

#include "names.h"
#include "onnxruntime/session.h"
#include "tide/errors.h"

namespace tide {
namespace names {

std::string slot(std::string const& name, std::size_t number) { return name + ".slot_" + std::to_string(number); }
std::string made(std::size_t layer, char const* kind) { return "new." + std::to_string(layer) + "." + kind; }
std::string skipped(std::size_t k) { return "skipped_" + two_digits(k); }
std::string batch_file(std::string const& name) { return "batch/" + name + ".onnx"; }
std::string batch_file(std::string const& name, std::size_t slots) {
  return batch_file("slots_" + two_digits(slots) + "_" + name);
}

}  // namespace names

namespace {

constexpr std::size_t kBatchSizes[] = {4, 8, 16, 32};  // there is a set of networks for each
constexpr std::size_t kMaxBatchSize = 32;

constexpr ONNXTensorElementDataType kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
constexpr ONNXTensorElementDataType kInt32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
constexpr ONNXTensorElementDataType kInt64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;

// Adds the K/V buffers of each row of the segment, `named` as they go in or come out.
void add_caches(TensorTypes& tensors, Layers layers, std::size_t rows,
                std::string (*named)(std::size_t layer, char const* kind)) {
  for (std::size_t layer = layers.first; layer < layers.first + layers.count; ++layer) {
    for (char const* kind : kKinds) {
      for (std::size_t row = 0; row < rows; ++row) tensors[names::slot(named(layer, kind), row)] = kFloat;
    }
  }
}

TensorTypes segment_inputs(Manifest const& manifest, std::size_t k, std::size_t rows) {
  TensorTypes tensors = {{names::kPositionIds, kInt64},
                         {names::kLastTokens, kInt64},
                         {names::kSlotTokens, kInt64},
                         {names::kSlotLengths, kInt32}};
  if (k == 0) tensors[names::kInputIds] = kInt64;
  if (k > 0) tensors[names::kHiddenStates] = kFloat;
  add_caches(tensors, layers_of(manifest, k), rows, names::past);
  return tensors;
}

TensorTypes segment_outputs(Manifest const& manifest, std::size_t k, std::size_t rows) {
  TensorTypes tensors = {{names::kExitStates, kFloat}};
  if (k < manifest.checkpoints.size()) {
    tensors[names::kNewHiddenStates] = kFloat;
    tensors[names::kRouterScore] = kFloat;
  }
  add_caches(tensors, layers_of(manifest, k), rows, names::present);
  return tensors;
}

TensorTypes skipped_outputs(Manifest const& manifest, std::size_t k) {
  TensorTypes tensors;
  Layers const layers = layers_of(manifest, k);
  for (std::size_t layer = layers.first; layer < layers.first + layers.count; ++layer) {
    for (char const* kind : kKinds) tensors[names::made(layer, kind)] = kFloat;
  }
  return tensors;
}

}  // namespace

Layers layers_of(Manifest const& manifest, std::size_t k) {
  std::vector<std::int64_t> const depths = manifest.depths();
  std::int64_t const first = k == 0 ? 0 : depths[k - 1];
  return {static_cast<std::size_t>(first), static_cast<std::size_t>(depths[k] - first)};
}

std::size_t BatchNetworks::max_batch_size() const {
  return bundle_.manifest.files.count(names::batch_file(names::kHead)) == 1 ? kMaxBatchSize : 1;
}

std::shared_ptr<BatchSessions> BatchNetworks::sessions(std::size_t count) {
  std::size_t const wanted = std::min(count, kMaxBatchSize);
  std::size_t const rows = *std::lower_bound(std::begin(kBatchSizes), std::end(kBatchSizes), wanted);
  std::lock_guard<std::mutex> const lock(mutex_);
  if (!opened_ || opened_->rows < rows) {
    opened_.reset();  // first, so that two sizes are never held but by a batch that is still running
    opened_ = open(rows);
  }
  return opened_;
}

std::shared_ptr<BatchSessions> BatchNetworks::open(std::size_t rows) const {
  Manifest const& manifest = bundle_.manifest;
  if (max_batch_size() == 1) {
    throw GenerationError("bundle '" + bundle_.path.string() +
                          "' holds no networks for batches (an earlier release made it, or its export said why): give "
                          "one prompt at a time");
  }
  auto opened = std::make_shared<BatchSessions>();
  opened->rows = rows;
  std::size_t const segments = manifest.checkpoints.size() + 1;
  for (std::size_t k = 0; k < segments; ++k) {
    opened->segments.push_back(load(opened->env, names::batch_file(names::segment(k), rows),
                                    segment_inputs(manifest, k, rows), segment_outputs(manifest, k, rows)));
  }
  opened->head =
      load(opened->env, names::batch_file(names::kHead), {{names::kExitStates, kFloat}}, {{names::kLogits, kFloat}});
  opened->exit_size = static_cast<std::size_t>(
      opened->head.GetInputTypeInfo(0).GetTensorTypeAndShapeInfo().GetShape().back());
  for (std::size_t k = 1; k < segments && manifest.propagates(); ++k) {
    opened->skipped.push_back(load(opened->env, names::batch_file(names::skipped(k)),
                                   {{names::kHiddenStates, kFloat}, {names::kPositionIds, kInt64}},
                                   skipped_outputs(manifest, k)));
  }
  return opened;
}

Ort::Session BatchNetworks::load(Ort::Env const& env, std::string const& name, TensorTypes const& inputs,
                                 TensorTypes const& outputs) const {
  if (bundle_.manifest.files.count(name) == 0) {
    throw BundleError("bundle '" + bundle_.path.string() + "' has no file " + name);
  }
  Ort::SessionOptions options = session_options(threads_);
  options.AddConfigEntry("session.model_external_initializers_file_folder_path", bundle_.path.c_str());
  return open_network(env, bundle_.path / name, options, inputs, outputs);
}

}  // namespace tide

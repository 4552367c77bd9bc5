#include "packed/networks.h"

#include <algorithm>

#include "names.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr std::size_t kBatchSizes[] = {8, 16, 32};  // a bundle has a set of networks for each
constexpr std::size_t kMaxBatchSize = 32;

constexpr ONNXTensorElementDataType kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
constexpr ONNXTensorElementDataType kInt32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
constexpr ONNXTensorElementDataType kInt64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;

// Adds the K/V buffers of the segment in each slot, with the names `name` gives them as inputs or outputs.
void add_caches(TensorTypes& tensors, Layers layers, std::size_t slots,
                std::string (*name)(std::size_t layer, char const* kind)) {
  for (std::size_t layer = layers.first; layer < layers.first + layers.count; ++layer) {
    for (char const* kind : names::kKinds) {
      for (std::size_t slot = 0; slot < slots; ++slot) tensors[names::slot(name(layer, kind), slot)] = kFloat;
    }
  }
}

TensorTypes segment_inputs(Manifest const& manifest, std::size_t k, std::size_t slots) {
  TensorTypes tensors = {{names::kPositionIds, kInt64},
                         {names::kLastTokens, kInt64},
                         {names::kSlotTokens, kInt64},
                         {names::kSlotLengths, kInt32}};
  if (k == 0) tensors[names::kInputIds] = kInt64;
  if (k > 0) tensors[names::kHiddenStates] = kFloat;
  add_caches(tensors, layers_of(manifest, k), slots, names::past);
  return tensors;
}

TensorTypes segment_outputs(Manifest const& manifest, std::size_t k, std::size_t slots) {
  TensorTypes tensors = {{names::kExitStates, kFloat}};
  if (k < manifest.checkpoints.size()) {
    tensors[names::kNewHiddenStates] = kFloat;
    tensors[names::kRouterScore] = kFloat;
  }
  add_caches(tensors, layers_of(manifest, k), slots, names::present);
  return tensors;
}

TensorTypes skipped_outputs(Manifest const& manifest, std::size_t k) {
  TensorTypes tensors;
  Layers const layers = layers_of(manifest, k);
  for (std::size_t layer = layers.first; layer < layers.first + layers.count; ++layer) {
    for (char const* kind : names::kKinds) tensors[names::new_kv(layer, kind)] = kFloat;
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
  return bundle_.manifest.files.count(batch_file(names::kHead)) == 1 ? kMaxBatchSize : 1;
}

std::shared_ptr<BatchSessions> BatchNetworks::sessions(std::size_t count) {
  std::size_t const size = std::min(count, kMaxBatchSize);
  std::size_t const slots = *std::lower_bound(std::begin(kBatchSizes), std::end(kBatchSizes), size);
  std::lock_guard<std::mutex> const lock(mutex_);
  if (!opened_ || opened_->slots < slots) {
    opened_.reset();  // first, so that only a batch that is still running keeps a second size in memory
    opened_ = open(slots);
  }
  return opened_;
}

std::shared_ptr<BatchSessions> BatchNetworks::open(std::size_t slots) const {
  Manifest const& manifest = bundle_.manifest;
  if (max_batch_size() == 1) {
    throw GenerationError("bundle '" + bundle_.path.string() +
                          "' holds no networks for batches (an earlier release made it, or its export said why): give "
                          "one prompt at a time");
  }
  auto opened = std::make_shared<BatchSessions>();
  opened->slots = slots;
  std::size_t const segments = manifest.checkpoints.size() + 1;
  for (std::size_t k = 0; k < segments; ++k) {
    opened->segments.push_back(load(opened->env, batch_file(names::segment(k), slots),
                                    segment_inputs(manifest, k, slots), segment_outputs(manifest, k, slots)));
  }
  opened->head =
      load(opened->env, batch_file(names::kHead), {{names::kExitStates, kFloat}}, {{names::kLogits, kFloat}});
  opened->exit_size = static_cast<std::size_t>(
      opened->head.GetInputTypeInfo(0).GetTensorTypeAndShapeInfo().GetShape().back());
  for (std::size_t k = 1; k < segments && manifest.propagates(); ++k) {
    opened->skipped.push_back(load(opened->env, batch_file(names::skipped(k)),
                                   {{names::kHiddenStates, kFloat}, {names::kPositionIds, kInt64}},
                                   skipped_outputs(manifest, k)));
  }
  return opened;
}

Ort::Session BatchNetworks::load(Ort::Env const& env, std::string const& name, TensorTypes const& inputs,
                                 TensorTypes const& outputs) const {
  return open_network(env, bundle_, name, threads_, inputs, outputs);
}

}  // namespace tide

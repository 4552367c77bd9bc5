#include "paged/networks.h"

#include <algorithm>

#include "generation_error.h"
#include "names.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr std::size_t kMaxBatchSize = 1024;

NetworkSpec segment_spec(Manifest const& manifest, std::size_t k, std::int64_t exit_size) {
  std::vector<std::int64_t> const states = {1, kTokens, manifest.model.hidden_size};
  NetworkSpec spec{names::segment(k),
                   {{names::kPositionIds, true, "int64", {1, kTokens}},
                    {names::kLastTokens, true, "int64", {kTokens}},
                    {names::kSequenceStarts, true, "int64", {kTokens}},
                    {names::kExitStates, false, "float32", {kTokens, exit_size}}}};
  if (k == 0) spec.tensors.push_back({names::kInputIds, true, "int64", {1, kTokens}});
  if (k > 0) spec.tensors.push_back({names::kHiddenStates, true, "float32", states});
  if (k < manifest.checkpoints.size()) {
    spec.tensors.push_back({names::kNewHiddenStates, false, "float32", states});
    spec.tensors.push_back({names::kSlotThresholds, true, "float32", {kTokens, 1}});
    spec.tensors.push_back({names::kRouterScore, false, "float32", {kTokens, 1}});
  }
  Layers const layers = layers_of(manifest, k);
  add_pages(spec, manifest, manifest.model.kv_read(layers.first, layers.count), kv_written(manifest, k));
  add_states(spec, manifest, states_of(manifest, layers));
  add_adapters(spec, manifest, layers);
  return spec;
}

NetworkSpec head_spec(Manifest const& manifest, std::int64_t exit_size) {
  return {names::kHead,
          {{names::kExitStates, true, "float32", {1, kTokens, exit_size}},
           {names::kLogits, false, "float32", {1, kTokens, manifest.model.vocab_size}}}};
}

}  // namespace

std::int64_t last_dimension(std::vector<Tensor> const& tensors, char const* name) {
  for (Tensor const& tensor : tensors) {
    if (tensor.name == name && !tensor.shape.empty()) return std::max<std::int64_t>(tensor.shape.back(), 0);
  }
  return 0;
}

Layers layers_of(Manifest const& manifest, std::size_t k) {
  std::vector<std::int64_t> const depths = manifest.depths();
  std::int64_t const first = k == 0 ? 0 : depths[k - 1];
  return {static_cast<std::size_t>(first), static_cast<std::size_t>(depths[k] - first)};
}

std::vector<std::size_t> kv_written(Manifest const& manifest, std::size_t k) {
  Layers const layers = layers_of(manifest, k);
  std::vector<std::size_t> written = manifest.model.kv_read(layers.first, layers.count);
  auto const of_earlier = [&](std::size_t attention) { return manifest.model.layer_of(attention) < layers.first; };
  written.erase(std::remove_if(written.begin(), written.end(), of_earlier), written.end());
  return written;
}

std::vector<std::size_t> states_of(Manifest const& manifest, Layers const& layers) {
  std::vector<std::size_t> numbers;
  for (std::size_t i = 0; i < manifest.model.states.size(); ++i) {
    auto const layer = static_cast<std::size_t>(manifest.model.states[i].layer);
    if (layers.first <= layer && layer < layers.first + layers.count) numbers.push_back(i);
  }
  return numbers;
}

bool adapts(Manifest const& manifest, Layers const& layers) {
  if (!manifest.model.lora) return false;
  auto const& targets = manifest.model.lora->targets;
  return std::any_of(targets.begin(), targets.end(), [&](auto const& target) {
    auto const layer = static_cast<std::size_t>(target.layer);
    return layers.first <= layer && layer < layers.first + layers.count;
  });
}

void add_adapters(NetworkSpec& spec, Manifest const& manifest, Layers const& layers) {
  if (!adapts(manifest, layers)) return;
  spec.tensors.push_back({names::kLoraWeights, true, "float32", {kTokens, manifest.model.lora->size()}});
  spec.tensors.push_back({names::kAdapters, true, "int64", {kTokens}});
}

void add_states(NetworkSpec& spec, Manifest const& manifest, std::vector<std::size_t> const& numbers) {
  if (!numbers.empty()) spec.tensors.push_back({names::kStatePlaces, true, "int64", {kTokens, 2}});
  for (std::size_t const number : numbers) {
    ModelInfo::State const& state = manifest.model.states[number];
    std::vector<std::int64_t> shape = state.shape;
    shape.insert(shape.begin(), kTokens);
    spec.tensors.push_back({names::states(state.layer, state.number), true, "float32", shape});
    spec.tensors.push_back({names::new_states(state.layer, state.number), false, "float32", shape});
  }
}

void add_pages(NetworkSpec& spec, Manifest const& manifest, std::vector<std::size_t> const& read,
               std::vector<std::size_t> const& written) {
  spec.tensors.push_back({names::kSequenceLengths, true, "int64", {kTokens}});
  spec.tensors.push_back({names::kPageTable, true, "int32", {kTokens, kTokens}});
  auto const add = [&](std::vector<std::size_t> const& layers, bool is_input, auto const& name) {
    for (std::size_t const layer : layers) {
      std::vector<std::int64_t> shape = manifest.kv_shape(layer, kTokens);
      shape[0] = kTokens;
      for (char const* kind : names::kKinds) {
        spec.tensors.push_back({name(layer, kind), is_input, manifest.kv_cache, shape});
      }
    }
  };
  add(read, true, names::pages);
  add(written, false, names::new_pages);
}

std::size_t BatchNetworks::max_batch_size() const {
  return bundle_.manifest.files.count(batch_file(names::kHead)) == 1 ? kMaxBatchSize : 1;
}

std::shared_ptr<BatchSessions> BatchNetworks::sessions() {
  bundle_.check_weights();
  std::lock_guard<std::mutex> const lock(mutex_);
  if (!opened_) opened_ = or_generation_error("cannot open the networks for batches", [&] { return open(); });
  return opened_;
}

std::shared_ptr<BatchSessions> BatchNetworks::open() const {
  Manifest const& manifest = bundle_.manifest;
  if (max_batch_size() == 1) {
    throw GenerationError("bundle '" + bundle_.path.string() +
                          "' holds no networks for batches (its export said why): give one prompt at a time");
  }
  auto opened = std::make_shared<BatchSessions>();
  std::size_t const segments = manifest.checkpoints.size() + 1;
  opened->head = load(opened->env, names::kHead);
  std::int64_t const exit_size = last_dimension(tensors_of(opened->head), names::kExitStates);
  check(opened->head, head_spec(manifest, exit_size), names::kHead);
  opened->exit_size = static_cast<std::size_t>(exit_size);
  for (std::size_t k = 0; k < segments; ++k) {
    opened->segments.push_back(load(opened->env, names::segment(k)));
    check(opened->segments.back(), segment_spec(manifest, k, exit_size), names::segment(k));
  }
  return opened;
}

void BatchNetworks::check(Ort::Session const& session, NetworkSpec const& spec, std::string const& name) const {
  spec.check(tensors_of(session), bundle_.file(batch_file(name)).path().string());
}

NetworkSession BatchNetworks::load(Ort::Env const& env, std::string const& name) const {
  return load_network(env, bundle_, batch_file(name), threads_);
}

}  // namespace tide

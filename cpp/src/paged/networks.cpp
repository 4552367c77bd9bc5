#include "paged/networks.h"

#include <algorithm>

#include "file_content.h"
#include "formatting.h"
#include "names.h"
#include "tide/errors.h"

namespace tide {
namespace {

// one_sequence: a run is over one alone. draft_size: of what the drafter reads, if the last segment gives that.
NetworkSpec segment_spec(Manifest const& manifest, std::size_t k, std::int64_t exit_size, std::int64_t draft_size,
                         bool one_sequence) {
  std::vector<std::int64_t> const hidden = {1, kTokens, manifest.model.hidden_size};
  NetworkSpec spec{names::segment(k),
                   {{names::kPositionIds, true, "int64", {1, kTokens}},
                    {names::kLastTokens, true, "int64", {kTokens}},
                    {names::kSequenceStarts, true, "int64", {kTokens}},
                    {names::kExitStates, false, "float32", {kTokens, exit_size}}}};
  if (k == 0) spec.tensors.push_back({names::kInputIds, true, "int64", {1, kTokens}});
  if (k > 0) spec.tensors.push_back({names::kHiddenStates, true, "float32", hidden});
  if (k < manifest.checkpoints.size()) {
    spec.tensors.push_back({names::kNewHiddenStates, false, "float32", hidden});
    spec.tensors.push_back({names::kSlotThresholds, true, "float32", {kTokens, 1}});
    spec.tensors.push_back({names::kRouterScore, false, "float32", {kTokens, 1}});
  }
  if (k == manifest.checkpoints.size() && draft_size > 0) {
    spec.tensors.push_back({names::kDraftStates, false, "float32", {1, kTokens, draft_size}});
  }
  Layers const layers = layers_of(manifest, k);
  add_pages(spec, manifest, manifest.model.kv_read(layers.first, layers.count), kv_written(manifest, k));
  add_states(spec, manifest, states_of(manifest, layers));
  add_adapters(spec, manifest, layers);
  for (Tensor& tensor : spec.tensors) {
    if (!one_sequence) break;
    if (tensor.name == names::kSequenceStarts) tensor.shape[0] = 2;
    bool const of_sequences = tensor.name == names::kSequenceLengths || tensor.name == names::kPageTable;
    if (of_sequences || tensor.name == names::kStatePlaces || tensor.name == names::kAdapters) tensor.shape[0] = 1;
  }
  return spec;
}

NetworkSpec head_spec(Manifest const& manifest, std::int64_t exit_size) {
  return {names::kHead,
          {{names::kExitStates, true, "float32", {1, kTokens, exit_size}},
           {names::kLogits, false, "float32", {1, kTokens, manifest.model.vocab_size}}}};
}

// The last dimension of a tensor; 0, which none has, where it is not a number or there is no such tensor.
std::int64_t last_dimension(std::vector<Tensor> const& tensors, char const* name) {
  for (Tensor const& tensor : tensors) {
    if (tensor.name == name && !tensor.shape.empty()) return std::max<std::int64_t>(tensor.shape.back(), 0);
  }
  return 0;
}

// Compares what a network was exported with, and its tensors do not show, with the manifest; earlier releases did not
// record it.
void check_metadata(Ort::Session const& session, Manifest const& manifest, std::string const& network) {
  auto const& context = manifest.model.context_length;
  std::pair<char const*, std::string> const fields[] = {
      {"checkpoints", joined(manifest.checkpoints, ",")},
      {"context_length", context ? std::to_string(*context) : std::string()},
      {"hidden_size", std::to_string(manifest.model.hidden_size)}};
  for (auto const& [field, expected] : fields) {
    std::string present;
    if (session.metadata((names::kMetadata + std::string(field)).c_str(), present) && present != expected) {
      throw BundleError(network + " was exported with other " + field + " than its manifest's " +
                        (expected.empty() ? "none" : expected) + ": export the bundle again or copy it anew");
    }
  }
}

}  // namespace

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
    return std::any_of(target.layers.begin(), target.layers.end(), [&](std::int64_t number) {
      auto const layer = static_cast<std::size_t>(number);
      return layers.first <= layer && layer < layers.first + layers.count;
    });
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

Networks::Networks(Bundle const& bundle, std::optional<std::int64_t> threads, Replacements const& replacements) {
  Manifest const& manifest = bundle.manifest;
  if (manifest.files.count(batch_file(names::kHead)) == 0) {
    throw BundleError("bundle " + quoted(bundle.path) + " holds no networks of its segments: export it again");
  }
  auto const load = [&](std::string const& name) {
    std::string const file = batch_file(name);
    if (!replacements) return load_network(env_, bundle, file, threads);
    std::optional<std::string> const graph = file_content(*replacements / file);
    if (!graph) throw BundleError("cannot read the graph " + quoted(*replacements / file));
    return load_network(env_, bundle, file, threads, kWeightsFile, std::nullopt, &*graph);
  };
  head_ = load(names::kHead);
  std::int64_t const exit_size = last_dimension(tensors_of(head_), names::kExitStates);
  head_spec(manifest, exit_size).check(tensors_of(head_), bundle.file(batch_file(names::kHead)).path().string());
  exit_size_ = static_cast<std::size_t>(exit_size);
  for (std::size_t k = 0; k <= manifest.checkpoints.size(); ++k) open_segment(bundle, k, load(names::segment(k)));
  std::size_t const read = draft_size_ > 0 ? draft_size_ : exit_size_;
  if (manifest.drafter && manifest.drafter->state_size != static_cast<std::int64_t>(read)) {
    throw BundleError("bundle " + quoted(bundle.path) + " gives hidden states of " + std::to_string(read) +
                      " numbers, not of the " + std::to_string(manifest.drafter->state_size) +
                      " that the drafter reads: export the bundle again");
  }
}

void Networks::open_segment(Bundle const& bundle, std::size_t k, NetworkSession session) {
  std::filesystem::path const file = bundle.file(batch_file(names::segment(k))).path();
  check_metadata(session, bundle.manifest, quoted(file));
  std::vector<Tensor> const tensors = tensors_of(session);
  auto const is_one = [](Tensor const& tensor) {
    return tensor.name == names::kSequenceLengths && tensor.shape == std::vector<std::int64_t>{1};
  };
  one_sequence_ = one_sequence_ || std::any_of(tensors.begin(), tensors.end(), is_one);
  std::int64_t const draft_size = last_dimension(tensors, names::kDraftStates);
  segment_spec(bundle.manifest, k, static_cast<std::int64_t>(exit_size_), draft_size, one_sequence_)
      .check(tensors, file.string());
  draft_size_ = static_cast<std::size_t>(draft_size);
  segments_.push_back(std::move(session));
}

}  // namespace tide

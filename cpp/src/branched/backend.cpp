#include "branched/backend.h"

#include "formatting.h"
#include "names.h"
#include "onnxruntime/session.h"
#include "packed/propagate.h"
#include "packed/sequence.h"
#include "tide/errors.h"

namespace tide {
namespace {

// The tensors that a graph of this manifest must have.
NetworkSpec graph_spec(Manifest const& manifest) {
  ModelInfo const& model = manifest.model;
  auto const count = static_cast<std::int64_t>(manifest.checkpoints.size());
  NetworkSpec spec{kGraphFile,
                   {{names::kInputIds, true, "int64", {1, kTokens}},
                    {names::kTotalLength, true, "int32", {}},
                    {names::kLogitsPositions, true, "int64", {kTokens, 2}},
                    {names::kLogits, false, "float32", {kTokens, model.vocab_size}}}};
  auto const add = [&](std::string const& name, bool is_input, std::vector<std::int64_t> shape) {
    spec.tensors.push_back({name, is_input, "float32", std::move(shape)});
  };
  if (count > 0) {
    add(names::kThresholds, true, {count});
    add(names::kScores, false, {1, count});
    if (!manifest.propagates()) add(names::kNewPending, false, {1, kTokens, model.hidden_size});
  }
  for (std::size_t k = 1; k <= manifest.checkpoints.size(); ++k) {
    add(names::skip_threshold(k), true, {1});
    if (!manifest.propagates()) add(names::pending(k), true, {1, kTokens, model.hidden_size});
  }
  for (std::size_t const layer : model.kv_read(0, model.kv_shapes.size())) {
    for (char const* kind : names::kKinds) {
      std::vector<std::int64_t> const shape = manifest.kv_shape(layer, kTokens);
      spec.tensors.push_back({names::past(layer, kind), true, manifest.kv_cache, shape});
      spec.tensors.push_back({names::present(layer, kind), false, manifest.kv_cache, shape});
    }
  }
  return spec;
}

// Compares what the graph was exported with, and its tensors do not show, with the manifest.
void check_metadata(Ort::Session const& session, Manifest const& manifest, std::string const& graph) {
  auto const& context = manifest.model.context_length;
  std::pair<char const*, std::string> const fields[] = {
      {"checkpoints", joined(manifest.checkpoints, ",")},
      {"context_length", context ? std::to_string(*context) : std::string()},
      {"hidden_size", std::to_string(manifest.model.hidden_size)}};
  for (auto const& [field, expected] : fields) {
    std::string present;
    if (!session.metadata((names::kMetadata + std::string(field)).c_str(), present)) {
      throw BundleError(graph + " does not record its " + field + ", as this release writes it: export again");
    }
    if (present != expected) {
      throw BundleError(graph + " was exported with other " + field + " than its manifest's " +
                        (expected.empty() ? "none" : expected) + ": export the bundle again or copy it anew");
    }
  }
}

}  // namespace

BranchedBackend::BranchedBackend(Bundle opened, std::optional<std::int64_t> threads, std::string const* replacement)
    : Backend(std::move(opened), "cpu"),
      batch_networks_(bundle(), threads, [this](ExitRule const& rule, KvBuffers& kv) { return start_lone(rule, kv); }) {
  env_ = Ort::Env("tide");
  std::filesystem::path const graph = bundle().file(kGraphFile).path();
  session_ = load_network(env_, bundle(), kGraphFile, threads, kWeightsFile, std::nullopt, replacement);
  graph_spec(manifest()).check(tensors_of(session_), graph.string());
  check_metadata(session_, manifest(), quoted(graph));
}

std::unique_ptr<Batch> BranchedBackend::start_batch(double compaction_threshold, std::size_t slots) {
  return tide::start_batch(batch_networks_.sessions(slots), manifest(), compaction_threshold,
                           batch_networks_.start_lone());
}

}  // namespace tide

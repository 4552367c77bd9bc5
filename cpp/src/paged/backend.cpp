#include "paged/backend.h"

#include <algorithm>
#include <utility>

#include "formatting.h"
#include "generation_error.h"
#include "names.h"
#include "paged/batch.h"
#include "paged/step_graph.h"
#include "request.h"
#include "tide/errors.h"

namespace tide {
namespace {

// The tensors that a graph of this manifest must have.
NetworkSpec graph_spec(Manifest const& manifest, std::int64_t exit_size) {
  ModelInfo const& model = manifest.model;
  auto const count = static_cast<std::int64_t>(manifest.checkpoints.size());
  NetworkSpec spec{kGraphFile,
                   {{names::kInputIds, true, "int64", {1, kTokens}},
                    {names::kLogitsPositions, true, "int64", {kTokens, 2}},
                    {names::kLogits, false, "float32", {kTokens, model.vocab_size}}}};
  auto const add = [&](std::string const& name, bool is_input, std::vector<std::int64_t> shape) {
    spec.tensors.push_back({name, is_input, "float32", std::move(shape)});
  };
  add(names::kFinalStates, false, {1, kTokens, exit_size});
  if (count > 0) {
    add(names::kThresholds, true, {count});
    add(names::kScores, false, {1, count});
    add(names::kNewPending, false, {1, kTokens, model.hidden_size});
  }
  for (std::size_t k = 1; k <= manifest.checkpoints.size(); ++k) {
    add(names::skip_threshold(k), true, {1});
    add(names::pending(k), true, {1, kTokens, model.hidden_size});
  }
  std::vector<std::size_t> const layers = model.kv_read(0, model.kv_shapes.size());
  add_pages(spec, manifest, layers, layers);
  add_states(spec, manifest, states_of(manifest, {0, model.kv_shapes.size()}));
  add_adapters(spec, manifest, {0, model.kv_shapes.size()});
  for (Tensor& tensor : spec.tensors) {  // of one sequence
    bool const of_sequences = tensor.name == names::kSequenceLengths || tensor.name == names::kPageTable;
    if (of_sequences || tensor.name == names::kStatePlaces || tensor.name == names::kAdapters) tensor.shape[0] = 1;
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

// A sequence that is stepped on its own.
class GraphSequence final : public Sequence {
 public:
  GraphSequence(Ort::Session& session, Manifest const& manifest, PagePool& pool, Adapters const& adapters, ExitRule rule)
      : sequence_(manifest, pool, std::move(rule)), graph_(session, manifest, pool, adapters), limit_(context_of(manifest)) {}

  StepResult step(std::int64_t const* ids, std::size_t count, std::int64_t, std::int64_t logits_to_keep,
                  bool full) override {
    sequence_.states = states;
    sequence_.settled = settled;
    sequence_.adapter = adapter;
    return graph_.step(sequence_, ids, count, logits_to_keep, full);
  }
  void rewind(std::int64_t length) override { sequence_.rewind(length); }
  void set_thresholds(std::vector<float> const& thresholds) override { sequence_.rule.thresholds = thresholds; }
  std::vector<std::int64_t> const& lengths() const override { return sequence_.lengths; }
  std::int64_t limit() const override { return limit_; }

 private:
  PagedSequence sequence_;
  StepGraph graph_;
  std::int64_t const limit_;
};

}  // namespace

PagedBackend::PagedBackend(Bundle opened, std::optional<std::int64_t> threads, AdapterFolders const& adapters,
                           std::string const* replacement)
    : Backend(std::move(opened), "cpu"), adapters_(bundle(), adapters), pool_(manifest()), batch_networks_(bundle(), threads), threads_(threads) {
  env_ = Ort::Env("tide");
  std::filesystem::path const graph = bundle().file(kGraphFile).path();
  session_ = load_network(env_, bundle(), kGraphFile, threads, kWeightsFile, std::nullopt, replacement);
  std::vector<Tensor> const tensors = tensors_of(session_);
  std::int64_t const state_size = last_dimension(tensors, names::kFinalStates);
  graph_spec(manifest(), state_size).check(tensors, graph.string());
  if (manifest().drafter && manifest().drafter->state_size != state_size) {
    throw BundleError(quoted(graph) + " gives states of " + std::to_string(state_size) + " numbers, not of the " +
                      std::to_string(manifest().drafter->state_size) + " that the drafter reads: export the bundle again");
  }
  check_metadata(session_, manifest(), quoted(graph));
}

std::unique_ptr<Sequence> PagedBackend::start(std::vector<float> const& thresholds, std::int64_t max_pending) {
  bundle().check_weights();
  return std::make_unique<GraphSequence>(session_, manifest(), pool_, adapters_, ExitRule{thresholds, max_pending});
}

std::unique_ptr<Drafts> PagedBackend::start_drafts(std::size_t slots) {
  if (!manifest().drafter) return nullptr;
  bundle().check_weights();
  return or_generation_error("cannot start the drafter", [&] {
    std::lock_guard<std::mutex> const lock(mutex_);
    if (!drafter_) drafter_ = std::make_unique<DrafterNetwork>(bundle(), threads_);
    return std::make_unique<PagedDrafts>(*drafter_, slots);
  });
}

std::unique_ptr<Batch> PagedBackend::start_batch(double compaction_threshold, std::size_t slots) {
  std::shared_ptr<BatchSessions> sessions = batch_networks_.sessions();
  slots = std::min(slots, max_batch_size());
  return or_generation_error("cannot start a batch", [&] {
    return std::make_unique<PagedBatch>(std::move(sessions), manifest(), pool_, adapters_, compaction_threshold, slots);
  });
}

}  // namespace tide

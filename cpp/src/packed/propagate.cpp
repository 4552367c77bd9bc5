#include "packed/propagate.h"

#include "generation_error.h"
#include "names.h"
#include "tide/errors.h"

namespace tide {

std::vector<StepResult> PropagatingBatch::run_step(std::vector<SlotRequest> const& requests) {
  std::vector<SlotStep> all = begin(requests);
  Steps active, exited;
  for (SlotStep& one : all) active.push_back(&one);
  frozen_states_.clear();
  float* input = nullptr;
  for (std::size_t k = 0; k < segments_.size(); ++k) {
    if (!exited.empty() && sessions_->skipped.count(k) == 1) skip(k, exited);
    if (active.empty()) continue;
    bool const last = k + 1 == segments_.size();
    for (SlotStep* const one : active) {
      bool const may_exit = !last && one->count == 1 && one->total > 1;
      one->threshold = static_cast<float>(may_exit ? one->sequence->rule.thresholds[k] : kNeverExit);
    }
    run(k, active, std::vector<std::int64_t>(active.size(), 1), input);
    SegmentRun& segment = *segments_[k];
    Steps still_active;
    std::vector<float> next_input;
    for (std::size_t i = 0; i < active.size(); ++i) {
      SlotStep& one = *active[i];
      float const* const states = last ? nullptr : new_states(k, one);
      if (!last && !(segment.scores[i] > one.threshold)) {
        still_active.push_back(&one);
        next_input.insert(next_input.end(), states, states + floats(one.count));
        continue;
      }
      auto const exit_state = segment.exit_states.begin() + static_cast<std::ptrdiff_t>(i * sessions_->exit_size);
      one.exit = k;
      one.exit_states.assign(exit_state, exit_state + static_cast<std::ptrdiff_t>(sessions_->exit_size));
      if (last) continue;
      exited.push_back(&one);
      frozen_states_.insert(frozen_states_.end(), states, states + floats(1));
    }
    input = segment.hidden.data();
    if (still_active.size() < active.size()) {
      input_ = std::move(next_input);
      input = input_.data();
    }
    active = std::move(still_active);
  }
  std::vector<StepResult> step_results = results(all);
  for (SlotStep& one : all) {
    for (std::size_t k = 0; k < segments_.size(); ++k) {
      one.sequence->lengths[k] = one.total;
      if (k > *one.exit) one.sequence->skipped[k] += one.count;
    }
    one.sequence->lone_is_current = false;
  }
  return step_results;
}

// Writes the keys and values that segment k's layers make of the frozen states of the sequences that exited before it.
void PropagatingBatch::skip(std::size_t k, Steps const& exited) {
  std::vector<std::size_t> const layers = kv_written(manifest_, k);
  std::vector<std::string> output_names;
  std::vector<char const*> outputs;
  for (std::size_t const layer : layers) {
    for (char const* kind : names::kKinds) output_names.push_back(names::new_kv(layer, kind));
  }
  for (std::string const& name : output_names) outputs.push_back(name.c_str());
  positions_.clear();
  for (SlotStep const* const one : exited) positions_.push_back(one->total - 1);
  auto const count = static_cast<std::int64_t>(exited.size());
  char const* const inputs[] = {names::kHiddenStates, names::kPositionIds};
  std::vector<Ort::Value> keys_values;
  try {
    Ort::Value const values[] = {view(memory_, frozen_states_.data(), {1, count, manifest_.model.hidden_size}),
                                 view(memory_, positions_.data(), {1, count})};
    keys_values = sessions_->skipped.at(k).Run(Ort::RunOptions{}, inputs, values, std::size(values), outputs.data(),
                                                outputs.size());
  } catch (Ort::Exception const& error) {
    throw GenerationError("ONNX Runtime failed in " + names::skipped(k) + ": " + first_line(error));
  }
  for (std::size_t i = 0; i < keys_values.size(); ++i) {
    std::size_t const layer = layers[i / std::size(names::kKinds)], kind = i % std::size(names::kKinds);
    auto const head_dim = static_cast<std::size_t>(manifest_.model.kv_shapes[layer].head_dim);
    float const* const values = keys_values[i].data<float>();  // [1, heads, m, head_dim]
    for (std::size_t s = 0; s < exited.size(); ++s) {
      auto const row = reinterpret_cast<char const*>(values + s * head_dim);
      std::size_t const stride = exited.size() * head_dim * sizeof(float);
      exited[s]->sequence->kv.buffer(layer, kind).write(positions_[s], 1, row, stride);
    }
  }
}

std::unique_ptr<PackedBatch> start_batch(std::shared_ptr<BatchSessions> sessions, Manifest const& manifest,
                                         double compaction_threshold, StartLone start_lone) {
  return or_generation_error("cannot start a batch", [&]() -> std::unique_ptr<PackedBatch> {
    if (manifest.propagates()) {
      return std::make_unique<PropagatingBatch>(std::move(sessions), manifest, std::move(start_lone));
    }
    return std::make_unique<PackedBatch>(std::move(sessions), manifest, compaction_threshold, std::move(start_lone));
  });
}

}  // namespace tide

#include "packed/propagate.h"

#include "names.h"
#include "formatting.h"
#include "tide/errors.h"

namespace tide {

std::vector<StepResult> PropagatingBatch::step(std::vector<Wanted> const& wanted) {
  std::vector<Going> all = take(wanted);
  Some running, still;
  for (Going& one : all) running.push_back(&one);
  still_states_.clear();
  float* entry = nullptr;
  for (std::size_t k = 0; k < segments_.size(); ++k) {
    if (!still.empty()) skip(k, still);
    if (running.empty()) continue;
    run(k, running, std::vector<std::int64_t>(running.size(), 1), entry);
    SegmentRun& segment = *segments_[k];
    bool const last = k + 1 == segments_.size();
    Some staying;
    std::vector<float> next;
    for (std::size_t i = 0; i < running.size(); ++i) {
      Going& one = *running[i];
      bool const decoding = one.count == 1 && one.total > 1;
      float const* const fresh = last ? nullptr : made(k, one);
      if (!last && !(decoding && segment.scores[i] > thresholds_[k])) {
        staying.push_back(&one);
        next.insert(next.end(), fresh, fresh + floats(one.count));
        continue;
      }
      auto const states = segment.states.begin() + static_cast<std::ptrdiff_t>(i * sessions_->exit_size);
      one.left = k;
      one.states.assign(states, states + static_cast<std::ptrdiff_t>(sessions_->exit_size));
      if (last) continue;
      still.push_back(&one);
      still_states_.insert(still_states_.end(), fresh, fresh + floats(1));
    }
    entry = segment.hidden.data();
    if (staying.size() < running.size()) {
      entry_ = std::move(next);
      entry = entry_.data();
    }
    running = std::move(staying);
  }
  std::vector<StepResult> results = answers(all);
  for (Going& one : all) {
    for (std::size_t k = 0; k < segments_.size(); ++k) {
      one.row->lengths[k] = one.total;
      if (k > *one.left) one.row->skipped[k] += one.count;
    }
  }
  return results;
}

// Writes the keys and values that segment k's layers make of the states of those who left before it.
void PropagatingBatch::skip(std::size_t k, Some const& still) {
  Layers const layers = layers_of(manifest_, k);
  std::vector<std::string> made_names;
  std::vector<char const*> outputs;
  for (std::size_t layer = layers.first; layer < layers.first + layers.count; ++layer) {
    for (char const* kind : kKinds) made_names.push_back(names::made(layer, kind));
  }
  for (std::string const& name : made_names) outputs.push_back(name.c_str());
  positions_.clear();
  for (Going const* const one : still) positions_.push_back(one->total - 1);
  auto const count = static_cast<std::int64_t>(still.size());
  char const* const inputs[] = {names::kHiddenStates, names::kPositionIds};
  std::vector<Ort::Value> made;
  try {
    Ort::Value const given[] = {view(memory_, still_states_.data(), {1, count, manifest_.model.hidden_size}),
                                view(memory_, positions_.data(), {1, count})};
    made = sessions_->skipped[k - 1].Run(Ort::RunOptions{}, inputs, given, std::size(given), outputs.data(),
                                         outputs.size());
  } catch (Ort::Exception const& error) {
    throw GenerationError("ONNX Runtime failed in " + names::skipped(k) + ": " + first_line(error));
  }
  for (std::size_t number = 0; number < made.size(); ++number) {
    std::size_t const layer = layers.first + number / std::size(kKinds), kind = number % std::size(kKinds);
    auto const head_dim = static_cast<std::size_t>(manifest_.model.kv_shapes[layer].head_dim);
    float const* const values = made[number].GetTensorData<float>();  // [1, heads, m, head_dim]
    for (std::size_t i = 0; i < still.size(); ++i) {
      still[i]->row->buffer(layer, kind).write(positions_[i], values + i * head_dim, still.size() * head_dim);
    }
  }
}

}  // namespace tide

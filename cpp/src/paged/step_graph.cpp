#include "paged/step_graph.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "formatting.h"
#include "names.h"
#include "tide/errors.h"

namespace tide {
namespace {

// The index of the first checkpoint whose score is above its threshold (NaN is not), else the number of checkpoints.
std::size_t first_above(std::vector<float> const& scores, std::vector<float> const& thresholds) {
  std::size_t number = 0;
  while (number < scores.size() && !(scores[number] > thresholds[number])) ++number;
  return number;
}

std::vector<std::size_t> all_layers(Manifest const& manifest) {
  return manifest.model.kv_read(0, manifest.model.kv_shapes.size());
}

}  // namespace

StepGraph::StepGraph(Ort::Session& session, Manifest const& manifest, PagePool const& pool, Adapters const& adapters)
    : session_(session),
      manifest_(manifest),
      binding_(session),
      pages_(binding_, manifest, pool, all_layers(manifest), all_layers(manifest),
             states_of(manifest, {0, manifest.model.kv_shapes.size()}),
             adapts(manifest, {0, manifest.model.kv_shapes.size()}) ? &adapters : nullptr),
      depths_(manifest.depths()),
      exit_thresholds_(manifest.checkpoints.size()),
      skip_thresholds_(exit_thresholds_),
      scores_(exit_thresholds_.size(), std::numeric_limits<float>::quiet_NaN()),
      logits_(static_cast<std::size_t>(manifest.model.vocab_size)) {
  for (std::size_t k = 1; k <= scores_.size(); ++k) pending_.push_back({names::pending(k)});
  // Outputs of unknown size: `GetOutputValues` returns them after the pages, in the order of the first binding.
  if (!pending_.empty()) binding_.BindOutput(names::kNewPending, memory_);
  select_logits(1);
  if (scores_.empty()) return;
  auto const count = static_cast<std::int64_t>(scores_.size());
  bind_input(names::kThresholds, exit_thresholds_.data(), {count});
  for (std::size_t k = 0; k < scores_.size(); ++k) {
    bind_input(names::skip_threshold(k + 1).c_str(), &skip_thresholds_[k], {1});
  }
  binding_.BindOutput(names::kScores, view(memory_, scores_.data(), {1, count}));
}

StepResult StepGraph::step(PagedSequence& sequence, std::int64_t const* ids, std::size_t count,
                           std::int64_t logits_to_keep, bool full) {
  std::int64_t const total = sequence.reserve(count);
  std::size_t segments_run = 1;
  StepResult result;
  try {
    pages_.clear();
    pages_.add(sequence, total);
    pages_.bind();
    bind_pending(sequence);
    bind_ids(ids, count);
    set_thresholds(sequence, total, full);
    std::int64_t const keep = std::min(logits_to_keep, total - sequence.lengths.back());  // of the last segment's run
    if (keep != num_logits_ || keep > 1) select_logits(keep);
    if (!pending_.empty() && (may_skip_ || !no_pending_output_)) {
      binding_.BindOutput(names::kNewPending, memory_);  // bound again, or it keeps the last step's shape
    }
    states_bound_ = states_bound_ || sequence.states;
    if (states_bound_) binding_.BindOutput(names::kFinalStates, memory_);  // after all others, and each time
    session_.Run(run_options_, binding_);
    segments_run += first_above(scores_, skip_thresholds_);
    bool const leaves_pending = !pending_.empty() && segments_run < depths_.size();
    std::vector<Ort::Value> outputs;
    if (leaves_pending || num_logits_ > 1 || states_bound_) outputs = binding_.GetOutputValues();
    std::size_t const first = 2 * all_layers(manifest_).size() + manifest_.model.states.size();
    rows_ = num_logits_ > 1 ? std::move(outputs[first + (pending_.empty() ? 0 : 1)]) : Ort::Value(nullptr);
    result.rows = rows_ ? static_cast<std::size_t>(rows_.shape()[0]) : 1;
    result.logits = rows_ ? rows_.data<float>() : logits_.data();
    if (sequence.states) {
      states_ = std::move(outputs.back());
      std::vector<std::int64_t> const shape = states_.shape();
      result.states = states_.data<float>();
      result.state_rows = static_cast<std::size_t>(shape[1]);
      result.state_width = static_cast<std::size_t>(shape[2]);
    }
    std::vector<float> pending;
    if (leaves_pending) {
      float const* const states = outputs[first].data<float>();
      pending.assign(states, states + outputs[first].count());
    }
    no_pending_output_ = !leaves_pending;
    sequence.ran(segments_run, total, std::move(pending));
  } catch (Ort::Exception const& error) {
    throw GenerationError("ONNX Runtime failed at token " + std::to_string(total) + ": " + first_line(error));
  }
  result.vocabulary = logits_.size();
  result.exit_layer = depths_[first_above(scores_, exit_thresholds_)];
  result.segments_run = static_cast<std::int64_t>(segments_run);
  result.scores = scores_.data();
  return result;
}

void StepGraph::bind_pending(PagedSequence const& sequence) {
  for (std::size_t k = 0; k < pending_.size(); ++k) {
    Pending& bound = pending_[k];
    std::vector<float> const& states = sequence.pending[k + 1];
    float const* const data = states.empty() ? &no_state_ : states.data();
    if (bound.states == data && bound.size == states.size()) continue;
    bound.states = nullptr;  // in case of an exception
    auto const width = manifest_.model.hidden_size;
    bind_input(bound.name.c_str(), data, {1, static_cast<std::int64_t>(states.size()) / width, width});
    bound.states = data;
    bound.size = states.size();
  }
}

void StepGraph::bind_ids(std::int64_t const* ids, std::size_t count) {
  if (count > 1) {
    ids_.assign(ids, ids + count);
    one_id_bound_ = false;
    bind_input(names::kInputIds, ids_.data(), {1, static_cast<std::int64_t>(count)});
    return;
  }
  one_id_ = ids[0];
  if (!one_id_bound_) bind_input(names::kInputIds, &one_id_, {1, 1});
  one_id_bound_ = true;
}

// Writes the step's thresholds. A segment whose pending tokens would exceed `max_pending` is forced to run: their number
// is known before the step, and it never falls with depth, so that the forced segments are the deepest.
void StepGraph::set_thresholds(PagedSequence const& sequence, std::int64_t total, bool full) {
  may_skip_ = false;
  for (std::size_t k = 0; k < scores_.size(); ++k) {
    float const threshold = full ? static_cast<float>(kNeverExit) : sequence.rule.thresholds[k];
    bool const forced = total - sequence.lengths[k + 1] > sequence.rule.max_pending;
    exit_thresholds_[k] = threshold;
    skip_thresholds_[k] = forced ? std::max(threshold, 1.0f) : threshold;  // still scored
    may_skip_ = may_skip_ || skip_thresholds_[k] < 1;
  }
}

// Requests the logits of the last `count` positions. One row is written to `logits_`; of several, ONNX Runtime
// allocates the output, because their number is known only when the last segment runs.
void StepGraph::select_logits(std::int64_t count) {
  std::int64_t const bound = std::exchange(num_logits_, 0);  // in case of an exception
  if (count != bound) {
    logits_positions_.assign(static_cast<std::size_t>(2 * count), 0);
    for (std::int64_t i = 0; i < count; ++i) logits_positions_[static_cast<std::size_t>(2 * i + 1)] = i - count;
    bind_input(names::kLogitsPositions, logits_positions_.data(), {count, 2});
  }
  if (count > 1) {
    binding_.BindOutput(names::kLogits, memory_);
  } else if (bound != 1) {
    binding_.BindOutput(names::kLogits, view(memory_, logits_.data(), {1, manifest_.model.vocab_size}));
  }
  num_logits_ = count;
}

}  // namespace tide

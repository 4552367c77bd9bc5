#include "packed/batch.h"

#include <algorithm>

#include "decoding/depth_rule.h"
#include "generation_error.h"
#include "names.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr std::int64_t kUnbound = -1, kPaddingBound = 0;

}  // namespace

PackedBatch::PackedBatch(std::shared_ptr<BatchSessions> sessions, Manifest const& manifest, double compaction_threshold,
                         StartLone start_lone)
    : sessions_(std::move(sessions)),
      manifest_(manifest),
      depths_(manifest.depths()),
      hidden_size_(static_cast<std::size_t>(manifest.model.hidden_size)),
      compaction_threshold_(compaction_threshold),
      start_lone_(std::move(start_lone)),
      padding_(manifest),
      sequences_(sessions_->slots),
      lone_(sessions_->slots),
      bound_(sessions_->slots, kPaddingBound) {
  padding_.kv.allocate(1, padding_.lengths);
  for (std::size_t slot = sessions_->slots; slot > 0; --slot) free_.push_back(slot - 1);
  for (std::size_t k = 0; k < depths_.size(); ++k) {
    segments_.push_back(std::make_unique<SegmentRun>(*sessions_, manifest, k, padding_));
  }
}

std::size_t PackedBatch::join(std::vector<double> const& thresholds, std::int64_t max_pending) {
  std::size_t const slot = free_.back();
  ExitRule rule{{thresholds.begin(), thresholds.end()}, max_pending};
  sequences_[slot] = std::make_unique<PackedSequence>(manifest_, std::move(rule));
  free_.pop_back();
  return slot;
}

void PackedBatch::leave(std::size_t slot) noexcept {
  lone_[slot].reset();  // first: it refers to the sequence's buffers
  sequences_[slot].reset();
  bound_[slot] = kUnbound;
  free_.push_back(slot);
}

std::vector<char> PackedBatch::read_kv(std::size_t slot, std::int64_t start, std::int64_t stop) const {
  return sequences_[slot]->kv.read(start, stop);
}

void PackedBatch::write_kv(std::size_t slot, std::vector<std::vector<char> const*> const& blocks, std::int64_t size,
                           std::int64_t length) {
  sequences_[slot]->write_kv(blocks, size, length);
}

std::vector<StepResult> PackedBatch::step(std::vector<SlotRequest> const& requests) {
  return or_generation_error("the step failed", [&] {
    if (requests.size() != 1 || !runs_alone(requests[0])) return run_step(requests);
    std::vector<StepResult> results(1);  // nothing may fail after the step
    results[0] = step_alone(requests[0]);
    return results;
  });
}

// A sequence alone returns the logits of its exit even where the last segment had to run.
bool PackedBatch::runs_alone(SlotRequest const& request) const {
  bool const has_limit = sequences_[request.slot]->rule.max_pending != kNoLimit;
  return start_lone_ && (!request.verifies || request.request.full || !has_limit);
}

StepResult PackedBatch::step_alone(SlotRequest const& request) {
  PackedSequence& sequence = *sequences_[request.slot];
  std::unique_ptr<LoneSequence>& lone = lone_[request.slot];
  if (lone == nullptr) lone = start_lone_(sequence.rule, sequence.kv);
  return sequence.step_alone(*lone, request.request);
}

std::vector<StepResult> PackedBatch::run_step(std::vector<SlotRequest> const& requests) {
  std::vector<SlotStep> all = begin(requests);
  Steps everyone;
  for (SlotStep& one : all) everyone.push_back(&one);
  Steps previous = everyone;
  for (std::size_t k = 0; k < segments_.size(); ++k) {
    Steps const active = k == 0 ? everyone : still_active(previous, k);
    if (active.empty()) break;
    bool const all_ran = previous.size() == all.size();
    Steps const scheduled =
        all_catch_up(active.size(), all.size(), all_ran, compaction_threshold_) ? everyone : active;
    float* const input = k == 0 ? nullptr : gather(k, scheduled, scheduled.size() == previous.size());
    bool const deepest = k + 1 == segments_.size();
    std::vector<std::int64_t> logits;
    for (SlotStep* const one : scheduled) {
      StepRequest const& request = one->request->request;
      bool const may_exit = !deepest && !one->exit && !request.full;
      one->threshold = static_cast<float>(may_exit ? one->sequence->rule.thresholds[k] : kNeverExit);
      logits.push_back(deepest && one->request->verifies ? std::min(request.logits_to_keep, one->count) : 1);
    }
    run(k, scheduled, logits, input);
    note_exits(k, scheduled, logits);
    previous = scheduled;
  }
  std::vector<StepResult> step_results = results(all);
  commit(all);
  return step_results;
}

std::vector<PackedBatch::SlotStep> PackedBatch::begin(std::vector<SlotRequest> const& requests) {
  std::vector<SlotStep> all;
  ids_.clear();
  for (SlotRequest const& request : requests) {
    std::vector<std::int64_t> const& ids = request.request.ids;
    PackedSequence& sequence = *sequences_[request.slot];
    sequence.reserve(ids.size());
    auto const count = static_cast<std::int64_t>(ids.size());
    all.push_back({&request, &sequence, sequence.length() + count, count});
    ids_.insert(ids_.end(), ids.begin(), ids.end());
  }
  bind();
  return all;
}

// Of the sequences that ran the previous segment, those that need segment k.
PackedBatch::Steps PackedBatch::still_active(Steps const& ran, std::size_t k) const {
  Steps still;
  for (SlotStep* const one : ran) {
    PackedSequence const& sequence = *one->sequence;
    if (is_active(one->exit.has_value(), one->total - sequence.lengths[k], sequence.rule.max_pending)) {
      still.push_back(one);
    }
  }
  return still;
}

// Segment k's input: the pending and the new hidden states of the scheduled sequences.
float* PackedBatch::gather(std::size_t k, Steps const& scheduled, bool all_of_previous) {
  bool const none_pending = std::all_of(scheduled.begin(), scheduled.end(),
                                        [&](SlotStep const* one) { return one->sequence->pending[k].empty(); });
  if (all_of_previous && none_pending) return segments_[k - 1]->hidden.data();
  input_.clear();
  for (SlotStep* const one : scheduled) {
    std::vector<float> const& pending = one->sequence->pending[k];
    float const* const states = new_states(k - 1, *one);
    input_.insert(input_.end(), pending.begin(), pending.end());
    input_.insert(input_.end(), states, states + floats(one->count));
    one->count += static_cast<std::int64_t>(pending.size() / hidden_size_);
  }
  return input_.data();
}

void PackedBatch::run(std::size_t k, Steps const& scheduled, std::vector<std::int64_t> const& logits, float* input) {
  std::vector<Part> parts;
  std::int64_t start = 0;
  for (std::size_t i = 0; i < scheduled.size(); ++i) {
    SlotStep& one = *scheduled[i];
    parts.push_back({one.request->slot, one.count, one.total, logits[i], one.threshold});
    one.start = static_cast<std::size_t>(start);
    one.segments_run = k + 1;
    start += one.count;
  }
  if (k == 0) return segments_[k]->run(parts, ids_.data());
  segments_[k]->run(parts, input);
}

// Notes which sequences exit after segment k, and their states.
void PackedBatch::note_exits(std::size_t k, Steps const& scheduled, std::vector<std::int64_t> const& logits) {
  SegmentRun const& segment = *segments_[k];
  bool const deepest = k + 1 == segments_.size();
  float const* states = segment.exit_states.data();
  for (std::size_t i = 0; i < scheduled.size(); ++i) {
    SlotStep& one = *scheduled[i];
    float const* const end = states + static_cast<std::size_t>(logits[i]) * sessions_->exit_size;
    bool const exits = deepest ? !one.exit || one.request->verifies : segment.scores[i] > one.threshold;
    if (exits) {
      one.exit = k;
      one.exit_states.assign(states, end);
    }
    states = end;
  }
}

std::vector<StepResult> PackedBatch::results(std::vector<SlotStep> const& all) {
  exit_states_.clear();
  for (SlotStep const& one : all) {
    exit_states_.insert(exit_states_.end(), one.exit_states.begin(), one.exit_states.end());
  }
  auto const width = sessions_->exit_size;
  auto const rows = static_cast<std::int64_t>(exit_states_.size() / width);
  char const *const inputs[] = {names::kExitStates}, *const outputs[] = {names::kLogits};
  try {
    Ort::Value const states = view(memory_, exit_states_.data(), {1, rows, static_cast<std::int64_t>(width)});
    logits_ = std::move(sessions_->head.Run(Ort::RunOptions{}, inputs, &states, 1, outputs, 1)[0]);
  } catch (Ort::Exception const& error) {
    throw GenerationError("ONNX Runtime failed in the head: " + first_line(error));
  }
  auto const vocabulary = static_cast<std::size_t>(logits_.shape().back());
  float const* logits = logits_.data<float>();
  std::vector<StepResult> step_results;
  for (SlotStep const& one : all) {
    StepResult result;
    result.logits = logits;
    result.rows = one.exit_states.size() / width;
    result.vocabulary = vocabulary;
    result.exit_layer = depths_[*one.exit];
    result.segments_run = static_cast<std::int64_t>(one.segments_run);
    step_results.push_back(result);
    logits += result.rows * vocabulary;
  }
  return step_results;
}

// Updates the sequences' lengths and pending states; copies first, so that an exception leaves all as before.
void PackedBatch::commit(std::vector<SlotStep>& all) {
  for (SlotStep& one : all) {
    if (one.segments_run == segments_.size()) continue;
    float const* const states = new_states(one.segments_run - 1, one);
    one.pending_states = one.sequence->pending[one.segments_run];
    one.pending_states.insert(one.pending_states.end(), states, states + floats(one.count));
  }
  for (SlotStep& one : all) {
    for (std::size_t k = 0; k < one.segments_run; ++k) {
      one.sequence->lengths[k] = one.total;
      one.sequence->pending[k].clear();
    }
    if (one.segments_run < segments_.size()) one.sequence->pending[one.segments_run] = std::move(one.pending_states);
    one.sequence->lone_is_current = false;
  }
}

// Binds the buffers that were replaced, also those that an earlier step that failed left unbound: a run has all slots.
void PackedBatch::bind() {
  for (std::size_t slot = 0; slot < bound_.size(); ++slot) {
    std::int64_t const capacity = sequences_[slot] == nullptr ? kPaddingBound : sequences_[slot]->kv.capacity();
    if (bound_[slot] == capacity) continue;
    bound_[slot] = kUnbound;  // in case of an exception
    PackedSequence& sequence = capacity == kPaddingBound ? padding_ : *sequences_[slot];
    for (auto const& segment : segments_) segment->bind(slot, sequence);
    bound_[slot] = capacity;
  }
}

}  // namespace tide

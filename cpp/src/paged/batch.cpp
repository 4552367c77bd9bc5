#include "paged/batch.h"

#include <algorithm>
#include <limits>

#include "generation_error.h"
#include "names.h"
#include "tide/errors.h"

namespace tide {

PagedBatch::PagedBatch(Networks& networks, Manifest const& manifest, PagePool& pool, Adapters const& adapters,
                       double compaction_threshold, std::size_t slots)
    : networks_(networks),
      manifest_(manifest),
      pool_(pool),
      compaction_threshold_(compaction_threshold),
      depths_(manifest.depths()),
      hidden_size_(static_cast<std::size_t>(manifest.model.hidden_size)),
      final_size_(networks.draft_size() > 0 ? networks.draft_size() : networks.exit_size()),
      sequences_(slots) {
  for (std::size_t slot = slots; slot > 0; --slot) free_.push_back(slot - 1);
  for (std::size_t k = 0; k < depths_.size(); ++k) {
    segments_.push_back(std::make_unique<NetworkRun>(networks_, manifest, pool, adapters, k));
  }
}

std::size_t PagedBatch::join(std::vector<double> const& thresholds, std::int64_t max_pending) {
  std::size_t const slot = free_.back();
  ExitRule rule{{thresholds.begin(), thresholds.end()}, max_pending};
  sequences_[slot] = std::make_unique<PagedSequence>(manifest_, pool_, std::move(rule));
  free_.pop_back();
  return slot;
}

void PagedBatch::leave(std::size_t slot) noexcept {
  sequences_[slot].reset();
  free_.push_back(slot);
}

std::vector<StepResult> PagedBatch::step(std::vector<SlotRequest> const& requests) {
  return or_generation_error("the step failed", [&] { return run_step(requests); });
}

std::vector<StepResult> PagedBatch::run_step(std::vector<SlotRequest> const& requests) {
  std::vector<Running> all = begin(requests);
  std::size_t ran = all.size();
  walk_segments(all, segments_.size(), compaction_threshold_, [&](std::size_t k, Steps const& scheduled) {
    run(k, scheduled, scheduled.size() == ran);
    ran = scheduled.size();
  });
  std::vector<StepResult> step_results = results(all);
  commit(all);
  return step_results;
}

// Makes room for the new tokens and gathers their ids.
std::vector<PagedBatch::Running> PagedBatch::begin(std::vector<SlotRequest> const& requests) {
  std::vector<Running> all;
  ids_.clear();
  for (SlotRequest const& request : requests) {
    std::vector<std::int64_t> const& ids = request.request.ids;
    PagedSequence& sequence = *sequences_[request.slot];
    std::int64_t const total = sequence.reserve(ids.size());
    all.push_back({{&request, &sequence, total}, static_cast<std::int64_t>(ids.size())});
    if (sequence.scores && requests.size() == 1) {
      all.back().scores.assign(depths_.size() - 1, std::numeric_limits<float>::quiet_NaN());
    }
    ids_.insert(ids_.end(), ids.begin(), ids.end());
  }
  return all;
}

// Runs segment k over some sequences. all_of_previous: whether they are those that ran the segment before.
void PagedBatch::run(std::size_t k, Steps const& scheduled, bool all_of_previous) {
  float* const input = k == 0 ? nullptr : gather(k, scheduled, all_of_previous);
  bool const deepest = k + 1 == segments_.size();
  std::vector<Part> parts;
  std::size_t start = 0;
  for (Running* const one : scheduled) {
    bool const gives_logits = deepest && (one->request->verifies || !one->exit);
    std::int64_t const needed = gives_logits ? std::min(one->request->request.logits_to_keep, one->count) : 1;
    std::int64_t const rows = deepest && reads_all(*one->sequence) ? one->count : needed;
    parts.push_back({&one->paged(), one->count, one->total, rows, one->threshold});
    one->logits = static_cast<std::size_t>(needed);
    one->start = start;
    start += static_cast<std::size_t>(one->count);
  }
  if (k == 0) {
    segments_[k]->run(parts, ids_.data());
  } else {
    segments_[k]->run(parts, input);
  }
  note_exits(k, scheduled, parts);
}

// Segment k's input: the pending and the new hidden states of the scheduled sequences.
float* PagedBatch::gather(std::size_t k, Steps const& scheduled, bool all_of_previous) {
  bool const none_pending = std::all_of(scheduled.begin(), scheduled.end(),
                                        [&](Running const* one) { return one->paged().pending[k].empty(); });
  if (all_of_previous && none_pending) return segments_[k - 1]->hidden.data();
  input_.clear();
  for (Running* const one : scheduled) {
    std::vector<float> const& pending = one->paged().pending[k];
    float const* const hidden = new_hidden(k - 1, *one);
    input_.insert(input_.end(), pending.begin(), pending.end());
    input_.insert(input_.end(), hidden, hidden + floats(one->count));
    one->count += static_cast<std::int64_t>(pending.size() / hidden_size_);
  }
  return input_.data();
}

// Notes which sequences exit after segment k, what the head reads of them, and the hidden states of those that this may be
// the last run over.
void PagedBatch::note_exits(std::size_t k, Steps const& scheduled, std::vector<Part> const& parts) {
  NetworkRun const& segment = *segments_[k];
  bool const deepest = k + 1 == segments_.size();
  float const* exit = segment.exit_states.data();
  for (std::size_t i = 0; i < scheduled.size(); ++i) {
    Running& one = *scheduled[i];
    float const* const end = exit + static_cast<std::size_t>(parts[i].logits) * networks_.exit_size();
    bool const exits = deepest ? !one.exit || one.request->verifies : segment.scores[i] > one.threshold;
    if (exits) {
      one.exit = k;
      one.exit_states.assign(end - one.logits * networks_.exit_size(), end);
    }
    bool const decides = !deepest && one.threshold < static_cast<float>(kNeverExit);
    if (decides && !one.scores.empty()) one.scores[k] = segment.scores[i];
    if (!deepest && one.exit) one.hidden.assign(new_hidden(k, one), new_hidden(k, one) + floats(one.count));
    if (deepest && reads_all(*one.sequence)) one.final_states.assign(exit, end);
    if (deepest && one.sequence->draft_states && !segment.draft_states.empty()) {
      float const* const first = segment.draft_states.data() + one.start * final_size_;
      one.final_states.assign(first, first + static_cast<std::size_t>(one.count) * final_size_);
    }
    exit = end;
  }
}

std::vector<StepResult> PagedBatch::results(std::vector<Running>& all) {
  exit_states_.clear();
  for (Running const& one : all) {
    exit_states_.insert(exit_states_.end(), one.exit_states.begin(), one.exit_states.end());
  }
  auto const width = networks_.exit_size();
  auto const rows = static_cast<std::int64_t>(exit_states_.size() / width);
  char const *const inputs[] = {names::kExitStates}, *const outputs[] = {names::kLogits};
  try {
    Ort::Value const states = view(memory_, exit_states_.data(), {1, rows, static_cast<std::int64_t>(width)});
    logits_ = std::move(networks_.head().Run(Ort::RunOptions{}, inputs, &states, 1, outputs, 1)[0]);
  } catch (Ort::Exception const& error) {
    throw GenerationError("ONNX Runtime failed in the head: " + first_line(error));
  }
  auto const vocabulary = static_cast<std::size_t>(logits_.shape().back());
  float const* logits = logits_.data<float>();
  float const* exits = exit_states_.data();
  std::vector<StepResult> step_results;
  for (Running& one : all) {
    PagedSequence& sequence = one.paged();
    sequence.final_states.swap(one.final_states);
    sequence.router_scores.swap(one.scores);
    StepResult result;
    result.logits = logits;
    result.rows = one.exit_states.size() / width;
    result.vocabulary = vocabulary;
    result.exit_layer = depths_[*one.exit];
    result.segments_run = static_cast<std::int64_t>(one.segments_run);
    if (sequence.scores && all.size() == 1) result.scores = sequence.router_scores.data();
    result.states = sequence.final_states.data();
    result.state_width = sequence.draft_states ? final_size_ : width;
    result.state_rows = sequence.final_states.size() / result.state_width;
    exits += one.exit_states.size();
    result.exit_state = exits - width;
    step_results.push_back(result);
    logits += result.rows * vocabulary;
  }
  return step_results;
}

// Updates the sequences' lengths and pending hidden states; copies first, so that an exception leaves all as before.
void PagedBatch::commit(std::vector<Running>& all) {
  for (Running& one : all) {
    if (one.segments_run == segments_.size()) continue;
    std::vector<float> const& pending = one.paged().pending[one.segments_run];
    one.hidden.insert(one.hidden.begin(), pending.begin(), pending.end());
  }
  for (Running& one : all) one.paged().ran(one.segments_run, one.total, std::move(one.hidden));
}

}  // namespace tide

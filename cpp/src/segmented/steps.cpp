#include "segmented/steps.h"

#include <algorithm>
#include <limits>

#include "decoding/depth_rule.h"
#include "names.h"
#include "request.h"

namespace tide {
namespace {

static_assert(kNever == static_cast<float>(kNeverExit));

// How many tokens may be pending before each segment: all of them must fit a run with the next token, and a buffer with
// the states of a run.
std::int64_t max_pending(NetworksInfo const& info, std::size_t segments) {
  auto const checkpoints = static_cast<std::int64_t>(std::max<std::size_t>(segments, 2) - 1);
  return std::min((info.max_tokens - 1) / checkpoints, info.state_rows - info.max_tokens);
}

// Whether the final states of all tokens that the last segment runs over are read.
bool reads_all(Sequence const& sequence) { return sequence.states || sequence.draft_states; }

}  // namespace

SegmentedSteps::SegmentedSteps(std::unique_ptr<SegmentBuffers> buffers, Manifest const& manifest)
    : buffers_(std::move(buffers)),
      manifest_(manifest),
      depths_(manifest.depths()),
      capacity_(std::min(manifest.model.context_length.value_or(buffers_->info().capacity), buffers_->info().capacity)),
      max_pending_(tide::max_pending(buffers_->info(), depths_.size())),
      lengths_(depths_.size(), std::vector<std::int64_t>(buffers_->slots())),
      results_(buffers_->slots()),
      states_(buffers_->slots()),
      exit_states_(buffers_->slots()),
      scores_(depths_.size() - 1) {}

std::vector<StepResult> SegmentedSteps::step(Slots& slots, std::vector<SlotRequest> const& requests,
                                             double compaction_threshold) {
  std::vector<Running> all = begin(slots, requests);
  for (Running& one : all) run_first_parts(one);
  bool const scores = all.size() == 1 && all[0].sequence->scores;
  bool const on_device = run_on_device(all, compaction_threshold, scores);
  if (!on_device) {
    run_segments(all, compaction_threshold, scores);
    run_head(all);
  }
  std::vector<StepResult> step_results;
  for (Running const& one : all) step_results.push_back(result(one));
  if (scores) {
    std::fill(scores_.begin(), scores_.end(), std::numeric_limits<float>::quiet_NaN());
    for (std::size_t k = 0; k < scores_.size() && k <= *all[0].exit && !requests[0].request.full; ++k) {
      if (all[0].sequence->rule.thresholds[k] > kSure) continue;
      scores_[k] = on_device ? buffers_->device_step().score(k) : buffers_->score(k);
    }
    step_results[0].scores = scores_.data();
  }
  for (Running& one : all) std::fill_n(one.sequence->lengths.begin(), one.segments_run, one.total);
  return step_results;
}

// Checks the new tokens, and notes how far every slot has come.
std::vector<SegmentedSteps::Running> SegmentedSteps::begin(Slots& slots,
                                                            std::vector<SlotRequest> const& requests) {
  std::vector<Running> all;
  for (SlotRequest const& request : requests) {
    Sequence& sequence = *slots[request.slot];
    std::vector<std::int64_t> const& ids = request.request.ids;
    std::int64_t const total = length_after(sequence.length(), ids.size(), capacity_);
    all.push_back({request.slot, &request, &sequence, sequence.lengths, total, total - request.request.logits_to_keep, 0,
                   ids.data()});
    results_[request.slot].logits.clear();
    results_[request.slot].candidates.clear();
    states_[request.slot].clear();
    exit_states_[request.slot].clear();
  }
  for (std::size_t k = 0; k < lengths_.size(); ++k) {
    for (std::size_t slot = 0; slot < lengths_[k].size(); ++slot) {
      bool const used = slot < slots.size() && slots[slot] != nullptr;
      lengths_[k][slot] = used ? slots[slot]->lengths[k] : 0;
    }
  }
  return all;
}

// Runs what is too much for one run through all segments, part by part, but for the last part; with the logits of the
// tokens from position `first` on that it ran over.
void SegmentedSteps::run_first_parts(Running& one) {
  std::int64_t const max_tokens = buffers_->info().max_tokens, total = one.total;
  while (total - lengths_.back()[one.slot] > max_tokens) {
    one.start = lengths_.back()[one.slot];
    one.total = one.start + max_tokens;
    one.ids = one.request->request.ids.data() + (lengths_[0][one.slot] - one.before[0]);
    for (std::size_t k = 0; k < lengths_.size(); ++k) run(k, {&one}, {kNever}, false);
    if (reads_all(*one.sequence)) buffers_->queue_states({final_states(one)});
    buffers_->wait();
    buffers_->take_states();
    // The next part's states take the place of those that were pending, which are not any more if it fails.
    std::fill(one.sequence->lengths.begin(), one.sequence->lengths.end(), one.before[0]);
    std::int64_t const kept = std::max(one.first, one.start);
    if (kept < one.total) {
      rows_.clear();
      add_rows(one, names::kFinalRow + kept - one.start, one.total - kept);
      buffers_->logits(rows_);
    }
  }
  one.start = lengths_.back()[one.slot];
  one.total = total;
  one.ids = one.request->request.ids.data() + (lengths_[0][one.slot] - one.before[0]);
}

// Runs segments and head in one launch, and notes which exit; returns false where the device cannot.
bool SegmentedSteps::run_on_device(std::vector<Running>& all, double compaction_threshold, bool scores) {
  if (!buffers_->device().records()) return false;
  DeviceStep& step = buffers_->device_step();
  std::vector<DeviceRequest> slots;
  rows_.clear();
  for (Running const& one : all) {
    if (lengths_[0][one.slot] != one.before[0]) return false;  // it is the last part of a long one
    if (one.sequence->exit_state) return false;                // it is known on the host alone which that is
    std::vector<float> thresholds(depths_.size() - 1, kNever);
    if (!one.request->request.full) thresholds = one.sequence->rule.thresholds;
    slots.push_back({one.slot, one.total, std::move(thresholds), std::min(one.sequence->rule.max_pending, max_pending_),
                     one.request->verifies, one.ids});
    add_final_rows(one);
  }
  if (!step.queue(slots, lengths_, compaction_threshold, scores, rows_)) return false;
  queue_states(all, 0);
  step.finish(rows_);
  for (Running& one : all) {
    one.segments_run = step.segments_run(one.slot);
    one.exit = step.exit(one.slot).value_or(depths_.size() - 1);
  }
  buffers_->take_states();
  for (Running const& one : all) {
    if (one.segments_run < depths_.size()) states_[one.slot].clear();
  }
  return true;
}

// Runs as many segments as the tokens need, and notes which exit.
void SegmentedSteps::run_segments(std::vector<Running>& all, double compaction_threshold, bool scores) {
  Steps steps;
  for (Running& one : all) steps.push_back(&one);
  for (std::size_t k = 0; k < depths_.size(); ++k) {
    if (k > 0) steps = scheduled(k, all, steps, compaction_threshold);
    if (steps.empty()) return;
    std::vector<float> thresholds;
    for (Running const* const one : steps) {
      bool const may_exit = k + 1 < depths_.size() && !one->exit && !one->request->request.full;
      thresholds.push_back(may_exit ? one->sequence->rule.thresholds[k] : kNever);
    }
    bool const decides = std::any_of(thresholds.begin(), thresholds.end(), [](float one) { return one < kSure; });
    run(k, steps, thresholds, decides || scores);
    for (Running* const one : steps) one->segments_run = k + 1;
    if (!decides) continue;
    buffers_->wait();
    for (Running* const one : steps) {
      if (!one->exit && buffers_->exits(one->slot)) one->exit = k;
    }
  }
}

// The sequences that run segment k, which some may need that ran the segment before.
SegmentedSteps::Steps SegmentedSteps::scheduled(std::size_t k, std::vector<Running>& all, Steps const& ran,
                                                double compaction_threshold) const {
  Steps active;
  for (Running* const one : ran) {
    std::int64_t const limit = std::min(one->sequence->rule.max_pending, max_pending_);
    if (is_active(one->exit.has_value(), one->total - one->before[k], limit)) active.push_back(one);
  }
  bool const all_ran = ran.size() == all.size();
  if (active.empty() || !all_catch_up(active.size(), all.size(), all_ran, compaction_threshold)) return active;
  Steps everyone;
  for (Running& one : all) everyone.push_back(&one);
  return everyone;
}

// Runs segment k over some sequences up to their `total`.
void SegmentedSteps::run(std::size_t k, Steps const& scheduled, std::vector<float> const& thresholds, bool verdict) {
  std::vector<RunRequest> runs;
  for (std::size_t i = 0; i < scheduled.size(); ++i) {
    Running const& one = *scheduled[i];
    runs.push_back({one.slot, one.total - lengths_[k][one.slot], thresholds[i], one.ids});
  }
  buffers_->run(k, runs, lengths_[k], lengths_[std::min(k + 1, lengths_.size() - 1)], verdict);
  for (Running const* const one : scheduled) lengths_[k][one->slot] = one->total;
}

// Runs the head on the rows of the exit states that the sequences' logits come from.
void SegmentedSteps::run_head(std::vector<Running>& all) {
  rows_.clear();
  for (Running& one : all) {
    bool const deep = one.segments_run == depths_.size();
    if (one.exit && at_its_exit(one.request->verifies, deep)) {
      results_[one.slot].logits.clear();
      results_[one.slot].candidates.clear();
      add_rows(one, names::kExitRow, 1);
      continue;
    }
    one.exit = depths_.size() - 1;
    add_final_rows(one);
  }
  queue_states(all, depths_.size());
  buffers_->logits(rows_);
  buffers_->take_states();
}

// Queues the copy of the final states of sequences that at least so many segments ran over, if they are asked for.
void SegmentedSteps::queue_states(std::vector<Running> const& all, std::size_t least) {
  std::vector<StateRows> states;
  for (Running const& one : all) {
    if (reads_all(*one.sequence) && one.segments_run >= least) states.push_back(final_states(one));
    if (one.sequence->exit_state) states.push_back(exit_state(one));
  }
  buffers_->queue_states(std::move(states));
}

// Adds the rows of a sequence that has run through all segments.
void SegmentedSteps::add_final_rows(Running const& one) {
  std::int64_t const kept = std::max(one.first, one.start);
  add_rows(one, names::kFinalRow + kept - one.start, one.total - kept);
}

// The states of the tokens that the last segment ran over.
StateRows SegmentedSteps::final_states(Running const& one) {
  return {one.slot, names::kFinalRow, one.total - one.start, &states_[one.slot]};
}

// What the head reads of its last token, whose exit is known.
StateRows SegmentedSteps::exit_state(Running const& one) {
  bool const exited = *one.exit + 1 < depths_.size();
  return {one.slot, exited ? names::kExitRow : names::kFinalRow + one.total - 1 - one.start, 1, &exit_states_[one.slot]};
}

// Adds rows of a sequence's exit states to those that the head is to run over.
void SegmentedSteps::add_rows(Running const& one, std::int64_t first_row, std::int64_t count) {
  std::size_t const needed = buffers_->head().count(one.sequence->candidates);
  for (std::int64_t row = first_row; row < first_row + count; ++row) {
    rows_.push_back({one.slot, row, needed, &results_[one.slot]});
  }
}

StepResult SegmentedSteps::result(Running const& one) {
  PositionLogits const& found = results_[one.slot];
  StepResult result;
  result.vocabulary = static_cast<std::size_t>(manifest_.model.vocab_size);
  result.logits = found.logits.data();
  result.rows = found.logits.size() / result.vocabulary + found.candidates.size();  // one of them is empty
  if (!found.candidates.empty()) result.candidates = found.candidates.data();
  result.state_width = static_cast<std::size_t>(buffers_->info().exit_size);
  if (!exit_states_[one.slot].empty()) result.exit_state = exit_states_[one.slot].data();
  if (!states_[one.slot].empty()) {
    result.states = states_[one.slot].data();
    result.state_rows = states_[one.slot].size() / result.state_width;
  }
  result.exit_layer = depths_[*one.exit];
  result.segments_run = static_cast<std::int64_t>(one.segments_run);
  return result;
}

}  // namespace tide

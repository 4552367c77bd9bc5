#include "segmented/batch.h"

#include <algorithm>
#include <limits>

#include "generation_error.h"
#include "names.h"

namespace tide {
namespace {

static_assert(kNever == static_cast<float>(kNeverExit));

// How many tokens may be pending before each segment: all of them must fit a run with the next token, and a buffer with
// the hidden states of a run.
std::int64_t max_pending(NetworksInfo const& info, std::size_t segments) {
  auto const checkpoints = static_cast<std::int64_t>(std::max<std::size_t>(segments, 2) - 1);
  return std::min((info.max_tokens - 1) / checkpoints, info.state_rows - info.max_tokens);
}

// Whether the final states of all tokens that the last segment runs over are read.
bool reads_all(Sequence const& sequence) { return sequence.states || sequence.draft_states; }

bool is_free(std::unique_ptr<Sequence> const& slot) { return slot == nullptr; }

}  // namespace

SegmentedBatch::SegmentedBatch(SegmentBackend& backend, std::unique_ptr<SegmentBuffers> buffers,
                               double compaction_threshold, std::size_t slots)
    : backend_(backend),
      buffers_(std::move(buffers)),
      compaction_threshold_(compaction_threshold),
      depths_(backend.manifest().depths()),
      capacity_(std::min(backend.manifest().model.context_length.value_or(buffers_->info().capacity),
                         buffers_->info().capacity)),
      max_pending_(tide::max_pending(buffers_->info(), depths_.size())),
      cumulative_(buffers_->info().cumulative),
      slots_(slots),
      lengths_(depths_.size(), std::vector<std::int64_t>(buffers_->slots())),
      results_(buffers_->slots()),
      final_states_(buffers_->slots()),
      exit_states_(buffers_->slots()),
      scores_(depths_.size() - 1) {}

SegmentedBatch::~SegmentedBatch() { backend_.give_back(std::move(buffers_)); }

std::size_t SegmentedBatch::free_slots() const {
  return static_cast<std::size_t>(std::count_if(slots_.begin(), slots_.end(), is_free));
}

std::size_t SegmentedBatch::join(std::vector<double> const& thresholds, std::int64_t max_pending) {
  auto const slot = static_cast<std::size_t>(std::find_if(slots_.begin(), slots_.end(), is_free) - slots_.begin());
  ExitRule rule{{thresholds.begin(), thresholds.end()}, std::min(max_pending, max_pending_)};
  auto joining = std::make_unique<Sequence>(backend_.manifest(), std::move(rule));
  buffers_->clear(slot);  // of what an earlier sequence left there
  slots_[slot] = std::move(joining);
  return slot;
}

std::vector<StepResult> SegmentedBatch::step(std::vector<SlotRequest> const& requests) {
  return or_generation_error("the step failed", [&] { return run_step(requests); });
}

std::vector<StepResult> SegmentedBatch::run_step(std::vector<SlotRequest> const& requests) {
  std::vector<Running> all = begin(requests);
  buffers_->record_runs(true);
  std::fill(scores_.begin(), scores_.end(), std::numeric_limits<float>::quiet_NaN());
  for (Running& one : all) run_first_parts(one);
  bool const scored = all.size() == 1 && all[0].sequence->scores, scores = scored && !all[0].request->request.full;
  bool const on_device = run_on_device(all, scores);
  if (!on_device) {
    walk_segments(all, depths_.size(), compaction_threshold_,
                  [&](std::size_t k, Steps const& scheduled) { run_and_decide(k, scheduled, scores); });
    run_head(all);
  }
  std::vector<StepResult> step_results;
  for (Running const& one : all) step_results.push_back(result(one));
  if (scored) step_results[0].scores = scores_.data();
  for (Running& one : all) std::fill_n(one.sequence->lengths.begin(), one.segments_run, one.total);
  return step_results;
}

// Checks the new tokens, and notes how far every slot has come.
std::vector<SegmentedBatch::Running> SegmentedBatch::begin(std::vector<SlotRequest> const& requests) {
  std::vector<Running> all;
  for (SlotRequest const& request : requests) {
    Sequence& sequence = *slots_[request.slot];
    std::vector<std::int64_t> const& ids = request.request.ids;
    std::int64_t const total = length_after(sequence.length(), ids.size(), capacity_);
    all.push_back({{&request, &sequence, total}, total - request.request.logits_to_keep, ids.data()});
    results_[request.slot].logits.clear();
    results_[request.slot].candidates.clear();
    final_states_[request.slot].clear();
    exit_states_[request.slot].clear();
  }
  for (std::size_t k = 0; k < lengths_.size(); ++k) {
    for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
      lengths_[k][slot] = slots_[slot] == nullptr ? 0 : slots_[slot]->lengths[k];
    }
  }
  return all;
}

// Runs what is too much for one run through all segments, part by part, but for the last part; with the logits of the
// tokens from position `first` on that it ran over.
void SegmentedBatch::run_first_parts(Running& one) {
  std::int64_t const max_tokens = buffers_->info().max_tokens, total = one.total;
  while (total - lengths_.back()[one.slot()] > max_tokens) {
    one.start = lengths_.back()[one.slot()];
    one.total = one.start + max_tokens;
    one.ids = one.request->request.ids.data() + (lengths_[0][one.slot()] - one.sequence->lengths[0]);
    for (std::size_t k = 0; k < lengths_.size(); ++k) run(k, {&one}, false);
    if (reads_all(*one.sequence)) buffers_->queue_exit_states({final_states(one)});
    buffers_->wait();
    buffers_->take_exit_states();
    // The next part's hidden states take the place of those that were pending, which are not any more if it fails.
    std::fill(one.sequence->lengths.begin(), one.sequence->lengths.end(), one.sequence->lengths[0]);
    std::int64_t const kept = std::max(one.first, one.start);
    if (kept < one.total) {
      rows_.clear();
      add_rows(one, names::kFinalRow + kept - one.start, one.total - kept);
      buffers_->logits(rows_);
    }
  }
  one.start = lengths_.back()[one.slot()];
  one.total = total;
  one.ids = one.request->request.ids.data() + (lengths_[0][one.slot()] - one.sequence->lengths[0]);
}

// Runs segments and head in one launch, and notes which exit; returns false where the device cannot.
bool SegmentedBatch::run_on_device(std::vector<Running>& all, bool scores) {
  if (!buffers_->device().records()) return false;
  DeviceStep& step = buffers_->device_step();
  std::vector<DeviceRequest> slots;
  rows_.clear();
  for (Running const& one : all) {
    if (lengths_[0][one.slot()] != one.sequence->lengths[0]) return false;  // it is the last part of a long one
    if (one.sequence->exit_state) return false;                // it is known on the host alone which that is
    std::vector<float> thresholds(depths_.size() - 1, kNever);
    if (!one.request->request.full) thresholds = one.sequence->rule.thresholds;
    slots.push_back({one.slot(), one.total, std::move(thresholds), one.sequence->rule.max_pending,
                     one.request->verifies, one.ids});
    add_final_rows(one);
  }
  if (!step.queue(slots, lengths_, compaction_threshold_, scores, rows_)) {
    buffers_->record_runs(!step.comes_again());
    return false;
  }
  queue_exit_states(all, 0);
  step.finish(rows_);
  for (Running& one : all) {
    one.segments_run = step.segments_run(one.slot());
    one.exit = step.exit(one.slot()).value_or(depths_.size() - 1);
    for (std::size_t k = 0; scores && k < scores_.size() && k <= *one.exit; ++k) note_score(one, k, step.score(k));
  }
  buffers_->take_exit_states();
  for (Running const& one : all) {
    if (one.segments_run < depths_.size()) final_states_[one.slot()].clear();
  }
  return true;
}

// Runs segment k over some sequences up to their `total`. verdict: whether its router's is read afterwards.
void SegmentedBatch::run(std::size_t k, Steps const& scheduled, bool verdict) {
  std::vector<RunRequest> runs;
  for (Running const* const one : scheduled) {
    float const threshold = cumulative_ ? threshold_of_rest(one->threshold, one->score) : one->threshold;
    runs.push_back({one->slot(), one->total - lengths_[k][one->slot()], threshold, one->ids});
  }
  buffers_->run(k, runs, lengths_[k], lengths_[std::min(k + 1, lengths_.size() - 1)], verdict);
  for (Running const* const one : scheduled) lengths_[k][one->slot()] = one->total;
}

// The same, and notes which exit. scores: whether the routers' are read.
void SegmentedBatch::run_and_decide(std::size_t k, Steps const& scheduled, bool scores) {
  std::vector<Running*> open;
  for (Running* const one : scheduled) {
    if (is_open(*one, k, scores)) open.push_back(one);
  }
  run(k, scheduled, !open.empty());
  if (open.empty()) return;
  buffers_->wait();
  for (Running* const one : open) {
    note_score(*one, k, buffers_->score(one->slot()));
    if (buffers_->exits(one->slot())) one->exit = k;
  }
}

// Whether the verdict of segment k's router on a sequence matters; to a later router, where scores are cumulative.
bool SegmentedBatch::is_open(Running const& one, std::size_t k, bool scores) const {
  if (k + 1 == depths_.size() || one.exit || one.request->request.full) return false;
  std::vector<float> const& limits = one.sequence->rule.thresholds;
  auto const first = limits.begin() + static_cast<std::ptrdiff_t>(k);
  return scores || std::any_of(first, cumulative_ ? limits.end() : first + 1, [](float limit) { return limit < kSure; });
}

// Takes what segment k's router gave for the last token of a sequence that has not exited before.
void SegmentedBatch::note_score(Running& one, std::size_t k, float given) {
  one.score = cumulative_ ? cumulative_score(one.score, given) : given;
  if (one.sequence->rule.thresholds[k] <= kSure) scores_[k] = one.score;
}

// Runs the head on the rows of the exit states that the sequences' logits come from.
void SegmentedBatch::run_head(std::vector<Running>& all) {
  rows_.clear();
  for (Running const& one : all) {
    if (*one.exit + 1 == depths_.size()) {
      add_final_rows(one);
      continue;
    }
    results_[one.slot()].logits.clear();
    results_[one.slot()].candidates.clear();
    add_rows(one, names::kExitRow, 1);
  }
  queue_exit_states(all, depths_.size());
  buffers_->logits(rows_);
  buffers_->take_exit_states();
}

// Queues the copy of the final states of sequences that at least so many segments ran over, if they are asked for.
void SegmentedBatch::queue_exit_states(std::vector<Running> const& all, std::size_t least) {
  std::vector<ExitStateRows> rows;
  for (Running const& one : all) {
    if (reads_all(*one.sequence) && one.segments_run >= least) rows.push_back(final_states(one));
    if (one.sequence->exit_state) rows.push_back(exit_state(one));
  }
  buffers_->queue_exit_states(std::move(rows));
}

// Adds the rows of a sequence that has run through all segments.
void SegmentedBatch::add_final_rows(Running const& one) {
  std::int64_t const kept = std::max(one.first, one.start);
  add_rows(one, names::kFinalRow + kept - one.start, one.total - kept);
}

// The final states of the tokens that the last segment ran over.
ExitStateRows SegmentedBatch::final_states(Running const& one) {
  return {one.slot(), names::kFinalRow, one.total - one.start, &final_states_[one.slot()]};
}

// What the head reads of its last token, whose exit is known.
ExitStateRows SegmentedBatch::exit_state(Running const& one) {
  bool const exited = *one.exit + 1 < depths_.size();
  return {one.slot(), exited ? names::kExitRow : names::kFinalRow + one.total - 1 - one.start, 1, &exit_states_[one.slot()]};
}

// Adds rows of a sequence's exit states to those that the head is to run over.
void SegmentedBatch::add_rows(Running const& one, std::int64_t first_row, std::int64_t count) {
  std::size_t const needed = buffers_->head().count(one.sequence->candidates);
  for (std::int64_t row = first_row; row < first_row + count; ++row) {
    rows_.push_back({one.slot(), row, needed, &results_[one.slot()]});
  }
}

StepResult SegmentedBatch::result(Running const& one) const {
  PositionLogits const& found = results_[one.slot()];
  StepResult result;
  result.vocabulary = static_cast<std::size_t>(backend_.manifest().model.vocab_size);
  result.logits = found.logits.data();
  result.rows = found.logits.size() / result.vocabulary + found.candidates.size();  // one of them is empty
  if (!found.candidates.empty()) result.candidates = found.candidates.data();
  result.state_width = static_cast<std::size_t>(buffers_->info().exit_size);
  if (!exit_states_[one.slot()].empty()) result.exit_state = exit_states_[one.slot()].data();
  if (!final_states_[one.slot()].empty()) {
    result.states = final_states_[one.slot()].data();
    result.state_rows = final_states_[one.slot()].size() / result.state_width;
  }
  result.exit_layer = depths_[*one.exit];
  result.segments_run = static_cast<std::int64_t>(one.segments_run);
  return result;
}

}  // namespace tide

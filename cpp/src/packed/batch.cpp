#include "packed/batch.h"

#include <algorithm>

#include "names.h"
#include "formatting.h"
#include "tide/errors.h"

namespace tide {

Batch::Batch(std::shared_ptr<BatchSessions> sessions, Manifest const& manifest, std::vector<double> const& thresholds,
             std::int64_t max_pending, double compaction_threshold)
    : sessions_(std::move(sessions)),
      manifest_(manifest),
      depths_(manifest.depths()),
      thresholds_(thresholds.begin(), thresholds.end()),
      hidden_size_(static_cast<std::size_t>(manifest.model.hidden_size)),
      max_pending_(max_pending),
      compaction_threshold_(compaction_threshold),
      nobody_(manifest),
      rows_(sessions_->rows) {
  nobody_.allocate(1);
  for (std::size_t place = sessions_->rows; place > 0; --place) free_.push_back(place - 1);
  for (std::size_t k = 0; k < depths_.size(); ++k) {
    segments_.push_back(std::make_unique<SegmentRun>(*sessions_, manifest, k, nobody_));
  }
}

std::size_t Batch::join() {
  std::size_t const place = free_.back();
  rows_[place] = std::make_unique<Row>(manifest_);
  free_.pop_back();
  return place;
}

void Batch::leave(std::size_t place) {
  bind(place, nobody_);
  rows_[place].reset();
  free_.push_back(place);
}

std::vector<StepResult> Batch::step(std::vector<Wanted> const& wanted) {
  std::vector<Going> all = take(wanted);
  Some everyone;
  for (Going& one : all) everyone.push_back(&one);
  Some needed = everyone, came;
  for (std::size_t k = 0; k < segments_.size(); ++k) {
    if (k > 0) needed = still_needing(needed, k);
    if (needed.empty()) break;
    bool const enough = static_cast<double>(needed.size()) >= compaction_threshold_ * static_cast<double>(all.size());
    Some const runners = enough && (k == 0 || came.size() == all.size()) ? everyone : needed;
    float* const entry = k == 0 ? nullptr : enter(k, runners, runners.size() == came.size());
    std::vector<std::int64_t> asked;
    for (Going const* const one : runners) {
      bool const rows = k + 1 == segments_.size() && one->wanted->verifies;
      asked.push_back(rows ? std::min(one->wanted->request.logits_to_keep, one->count) : 1);
    }
    run(k, runners, asked, entry);
    note_exits(k, runners, asked);
    came = runners;
  }
  std::vector<StepResult> results = answers(all);
  commit(all);
  return results;
}

std::vector<Batch::Going> Batch::take(std::vector<Wanted> const& wanted) {
  std::vector<Going> all;
  ids_.clear();
  for (Wanted const& one : wanted) {
    std::vector<std::int64_t> const& ids = one.request.ids;
    Row& row = *rows_[one.place];
    row.reserve(ids.size());
    if (!row.bound) bind(one.place, row);
    auto const count = static_cast<std::int64_t>(ids.size());
    all.push_back({&one, &row, row.length() + count, count});
    ids_.insert(ids_.end(), ids.begin(), ids.end());
  }
  return all;
}

// Of those that needed the segment before, who needs this one.
Batch::Some Batch::still_needing(Some const& needed, std::size_t k) const {
  Some found;
  for (Going* const one : needed) {
    if (!one->left || one->total - one->row->lengths[k] > max_pending_) found.push_back(one);
  }
  return found;
}

// The hidden states that enter segment k: all that waits before it of `some`, what waited and what is new.
float* Batch::enter(std::size_t k, Some const& some, bool all_that_came) {
  bool const none_waited =
      std::all_of(some.begin(), some.end(), [&](Going const* one) { return one->row->waiting[k].empty(); });
  if (all_that_came && none_waited) return segments_[k - 1]->hidden.data();
  entry_.clear();
  for (Going* const one : some) {
    std::vector<float> const& waited = one->row->waiting[k];
    float const* const fresh = made(k - 1, *one);
    entry_.insert(entry_.end(), waited.begin(), waited.end());
    entry_.insert(entry_.end(), fresh, fresh + floats(one->count));
    one->count += static_cast<std::int64_t>(waited.size() / hidden_size_);
  }
  return entry_.data();
}

void Batch::run(std::size_t k, Some const& some, std::vector<std::int64_t> const& asked, float* entry) {
  std::vector<Part> parts;
  std::int64_t start = 0;
  for (std::size_t i = 0; i < some.size(); ++i) {
    Going& one = *some[i];
    parts.push_back({one.wanted->place, one.count, one.total, asked[i]});
    one.start = static_cast<std::size_t>(start);
    one.ran = k + 1;
    start += one.count;
  }
  if (k == 0) return segments_[k]->run(parts, ids_.data());
  segments_[k]->run(parts, entry);
}

// Who could leave behind segment k, with what states.
void Batch::note_exits(std::size_t k, Some const& some, std::vector<std::int64_t> const& asked) {
  SegmentRun const& segment = *segments_[k];
  bool const deepest = k + 1 == segments_.size();
  float const* states = segment.states.data();
  for (std::size_t i = 0; i < some.size(); ++i) {
    Going& one = *some[i];
    float const* const end = states + static_cast<std::size_t>(asked[i]) * sessions_->exit_size;
    bool const leaves = deepest || (segment.scores[i] > thresholds_[k] && !one.wanted->request.full);
    if (leaves && (!one.left || (deepest && one.wanted->verifies))) {
      one.left = k;
      one.states.assign(states, end);
    }
    states = end;
  }
}

std::vector<StepResult> Batch::answers(std::vector<Going> const& all) {
  exit_states_.clear();
  for (Going const& one : all) exit_states_.insert(exit_states_.end(), one.states.begin(), one.states.end());
  auto const width = sessions_->exit_size;
  auto const rows = static_cast<std::int64_t>(exit_states_.size() / width);
  char const *const inputs[] = {names::kExitStates}, *const outputs[] = {names::kLogits};
  try {
    Ort::Value const states = view(memory_, exit_states_.data(), {1, rows, static_cast<std::int64_t>(width)});
    logits_ = std::move(sessions_->head.Run(Ort::RunOptions{}, inputs, &states, 1, outputs, 1)[0]);
  } catch (Ort::Exception const& error) {
    throw GenerationError("ONNX Runtime failed in the head: " + first_line(error));
  }
  auto const vocabulary = static_cast<std::size_t>(logits_.GetTensorTypeAndShapeInfo().GetShape().back());
  float const* logits = logits_.GetTensorData<float>();
  std::vector<StepResult> results;
  for (Going const& one : all) {
    StepResult result;
    result.logits = logits;
    result.rows = one.states.size() / width;
    result.vocabulary = vocabulary;
    result.exit_layer = depths_[*one.left];
    result.segments_run = static_cast<std::int64_t>(one.ran);
    results.push_back(result);
    logits += result.rows * vocabulary;
  }
  return results;
}

// Writes down how far everyone has come and what waits now, once nothing can fail any more.
void Batch::commit(std::vector<Going>& all) {
  for (Going& one : all) {
    if (one.ran == segments_.size()) continue;
    float const* const fresh = made(one.ran - 1, one);
    one.door = one.row->waiting[one.ran];
    one.door.insert(one.door.end(), fresh, fresh + floats(one.count));
  }
  for (Going& one : all) {
    for (std::size_t k = 0; k < one.ran; ++k) {
      one.row->lengths[k] = one.total;
      one.row->waiting[k].clear();
    }
    if (one.ran < segments_.size()) one.row->waiting[one.ran] = std::move(one.door);
  }
}

float const* Batch::made(std::size_t k, Going const& one) const {
  return segments_[k]->hidden.data() + one.start * hidden_size_;
}

void Batch::bind(std::size_t place, Row& row) {
  try {
    for (auto const& segment : segments_) segment->bind_row(place, row);
  } catch (Ort::Exception const& error) {
    throw GenerationError("ONNX Runtime failed to bind K/V buffers: " + first_line(error));
  }
  row.bound = true;
}

}  // namespace tide

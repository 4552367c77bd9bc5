// One sequence on segment networks, which decides after every router whether the next segment runs, by the rule of the
// branched graph: a token that exits leaves its hidden state pending before the next segment, and the first later token
// that needs the segment runs it over all pending tokens. `SequenceBuffers` holds the memory and runs the networks.
#include <algorithm>
#include <limits>
#include <optional>

#include "names.h"
#include "segmented/backend.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr float kNever = static_cast<float>(kNeverExit), kSure = 1.0F;  // no score is above either

class SegmentedSequence final : public Sequence {
 public:
  SegmentedSequence(SegmentBackend& backend, std::unique_ptr<SequenceBuffers> buffers,
                    std::vector<float> const& thresholds, std::int64_t max_pending)
      : backend_(backend),
        buffers_(std::move(buffers)),
        depths_(backend.manifest().depths()),
        max_pending_(std::min(max_pending, pending_limit())),
        lengths_(depths_.size()),
        thresholds_(thresholds),
        scores_(thresholds.size()) {}
  ~SegmentedSequence() override { backend_.give_back(std::move(buffers_)); }

  StepResult step(std::int64_t const* ids, std::size_t, std::int64_t total, std::int64_t logits_to_keep,
                  bool full) override {
    std::vector<std::int64_t> const before = lengths_;
    std::int64_t const first = total - logits_to_keep;  // the first position that gets logits
    logits_.clear();
    candidates_.clear();
    std::vector<std::int64_t> lengths = run_first_parts(ids, total, first);
    std::int64_t const start = lengths.back();
    std::int64_t const* const rest = ids + (lengths[0] - before[0]);
    std::size_t segments_run = 0;
    std::optional<std::size_t> exit;
    for (; segments_run < lengths.size(); ++segments_run) {
      std::size_t const k = segments_run;
      bool const forced = full || total - before[k] > max_pending_;
      if (exit && !forced) break;
      bool const may_exit = !full && !exit && k < thresholds_.size();
      run(k, rest, total, lengths, may_exit ? thresholds_[k] : kNever);
      if (may_exit && thresholds_[k] < kSure && buffers_->decision(k).exits) exit = k;
    }
    if (exit) logits_.clear();
    if (exit) candidates_.clear();
    if (exit) append(names::kExitRow, 1);
    std::int64_t const kept = std::max(first, start);
    if (!exit) append(names::kFinalRow + kept - start, total - kept);
    std::fill(scores_.begin(), scores_.end(), std::numeric_limits<float>::quiet_NaN());
    for (std::size_t k = 0; k < std::min(segments_run, scores_.size()); ++k) scores_[k] = buffers_->decision(k).score;
    StepResult result;
    result.vocabulary = static_cast<std::size_t>(backend_.manifest().model.vocab_size);
    result.logits = logits_.data();
    result.rows = logits_.size() / result.vocabulary + candidates_.size();  // one of them is empty
    if (!candidates_.empty()) result.candidates = candidates_.data();
    result.exit_layer = depths_[exit.value_or(segments_run - 1)];
    result.segments_run = static_cast<std::int64_t>(segments_run);
    result.scores = scores_.data();
    std::fill_n(lengths_.begin(), segments_run, total);
    return result;
  }

  // Pending states are in the order of the tokens; K/V beyond the new length are overwritten before they are read.
  void rewind(std::int64_t length) override {
    for (std::int64_t& segment_length : lengths_) segment_length = std::min(segment_length, length);
  }

  void set_thresholds(std::vector<float> const& thresholds) override { thresholds_ = thresholds; }

  std::vector<std::int64_t> const& lengths() const override { return lengths_; }
  std::int64_t limit() const override {
    std::int64_t const capacity = backend_.manifest().networks->capacity;
    return std::min(backend_.manifest().model.context_length.value_or(capacity), capacity);
  }
  std::int64_t capacity() const override { return limit(); }

 private:
  // What is pending before all segments must fit a run with the next token, and a buffer with the states of a run.
  std::int64_t pending_limit() const {
    NetworksInfo const& info = buffers_->info();
    auto const segments = static_cast<std::int64_t>(std::max<std::size_t>(depths_.size(), 2) - 1);
    return std::min((info.max_tokens - 1) / segments, info.state_rows - info.max_tokens);
  }

  // Runs what is too much for one run through all segments, part by part, but for the last part. Returns the lengths
  // after it; `logits_` or `candidates_` holds those of the tokens from position `first` on that it ran over.
  std::vector<std::int64_t> run_first_parts(std::int64_t const* ids, std::int64_t total, std::int64_t first) {
    std::int64_t const max_tokens = buffers_->info().max_tokens, begin = lengths_[0];
    std::vector<std::int64_t> lengths = lengths_;
    while (total - lengths.back() > max_tokens) {
      std::int64_t const start = lengths.back(), stop = start + max_tokens;
      std::int64_t const* const part = ids + (lengths[0] - begin);
      for (std::size_t k = 0; k < lengths.size(); ++k) run(k, part, stop, lengths, kNever);
      // The next part's states take the place of those that were pending, which are not any more if it fails.
      std::fill(lengths_.begin(), lengths_.end(), begin);
      std::int64_t const kept = std::max(first, start);
      if (kept < stop) append(names::kFinalRow + kept - start, stop - kept);
    }
    return lengths;
  }

  // Appends what the head gives on rows of the exit states, as much as is needed of it.
  void append(std::int64_t first_row, std::int64_t count) {
    std::size_t const needed = buffers_->head().count(candidates);
    if (needed == 0) buffers_->append_logits(first_row, count, logits_);
    if (needed > 0) buffers_->append_candidates(first_row, count, needed, candidates_);
  }

  // Runs segment k up to `total` tokens. ids: those after `lengths[0]`.
  void run(std::size_t k, std::int64_t const* ids, std::int64_t total, std::vector<std::int64_t>& lengths,
           float threshold) {
    std::int64_t const pending = k + 1 < lengths.size() ? lengths[k] - lengths[k + 1] : 0;
    buffers_->run(k, ids, total - lengths[k], lengths[k], pending, threshold);
    lengths[k] = total;
  }

  SegmentBackend& backend_;
  std::unique_ptr<SequenceBuffers> buffers_;
  std::vector<std::int64_t> const depths_;
  std::int64_t const max_pending_;
  std::vector<std::int64_t> lengths_;
  std::vector<float> thresholds_, scores_, logits_;
  std::vector<Candidates> candidates_;
};

}  // namespace

SegmentBackend::SegmentBackend(Bundle bundle, std::string provider, std::vector<NetworkSpec> specs,
                               std::function<DeviceNetworks()> open_device)
    : Backend(std::move(bundle), std::move(provider)), specs_(std::move(specs)), open_device_(std::move(open_device)) {}

std::unique_ptr<Sequence> SegmentBackend::start(std::vector<float> const& thresholds, std::int64_t max_pending,
                                                std::int64_t) {
  return std::make_unique<SegmentedSequence>(*this, take(), thresholds, max_pending);
}

std::unique_ptr<SequenceBuffers> SegmentBackend::take() {
  std::unique_ptr<SequenceBuffers> buffers;
  {
    std::lock_guard<std::mutex> const lock(mutex_);
    if (!free_.empty()) {
      buffers = std::move(free_.back());
      free_.pop_back();
    } else {
      free_.reserve(++allocated_);  // `give_back` must not throw
    }
  }
  if (buffers != nullptr) {
    buffers->clear();
    return buffers;
  }
  return std::make_unique<SequenceBuffers>(specs_, open_device_(), *manifest().networks);
}

void SegmentBackend::give_back(std::unique_ptr<SequenceBuffers> buffers) {
  std::lock_guard<std::mutex> const lock(mutex_);
  free_.push_back(std::move(buffers));
}

}  // namespace tide

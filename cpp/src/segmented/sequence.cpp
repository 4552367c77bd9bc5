// One sequence on segment networks, which decides after every router whether the next segment runs, by the rule of the
// branched graph: a token that exits leaves its hidden state pending before the next segment, and the first later token
// that needs the segment runs it over all pending tokens. `SequenceBuffers` holds the memory and runs the networks.
#include <algorithm>
#include <limits>

#include "segmented/backend.h"
#include "tide/errors.h"

namespace tide {
namespace {

class SegmentedSequence final : public Sequence {
 public:
  SegmentedSequence(SegmentBackend& backend, std::unique_ptr<SequenceBuffers> buffers,
                    std::vector<float> const& thresholds, std::int64_t max_pending)
      : backend_(backend),
        buffers_(std::move(buffers)),
        depths_(backend.manifest().depths()),
        max_pending_(max_pending),
        lengths_(depths_.size()),
        scores_(thresholds.size()) {
    set_thresholds(thresholds);
  }
  ~SegmentedSequence() override { backend_.give_back(std::move(buffers_)); }

  StepResult step(std::int64_t const* ids, std::size_t, std::int64_t total, std::int64_t logits_to_keep,
                  bool full) override {
    std::int64_t const keep = std::min(logits_to_keep, total - lengths_.back());
    std::size_t segments_run = 0;
    for (; segments_run < lengths_.size(); ++segments_run) {
      std::size_t const k = segments_run;
      std::int64_t const length = lengths_[k], count = total - length;
      bool const forced = full || count > max_pending_;
      if (k > 0 && !forced && buffers_->decision(k - 1).exits) break;
      std::int64_t const pending = k + 1 < lengths_.size() ? length - lengths_[k + 1] : 0;
      buffers_->run(k, ids, count, length, pending, keep);
    }
    // If a segment was forced to run after an exit, the first exit counts.
    std::fill(scores_.begin(), scores_.end(), std::numeric_limits<float>::quiet_NaN());
    std::size_t exit = segments_run - 1;
    for (std::size_t k = std::min(segments_run, scores_.size()); k-- > 0;) {
      Decision const decision = buffers_->decision(k);
      scores_[k] = decision.score;
      if (decision.exits && !full) exit = k;
    }
    bool const several = exit + 1 == lengths_.size() && keep > 1;
    StepResult result;
    result.logits = several ? buffers_->position_logits() : buffers_->logits(exit);
    result.rows = several ? static_cast<std::size_t>(keep) : 1;
    result.vocabulary = static_cast<std::size_t>(backend_.manifest().model.vocab_size);
    result.exit_layer = depths_[exit];
    result.segments_run = static_cast<std::int64_t>(segments_run);
    result.scores = scores_.data();
    std::fill_n(lengths_.begin(), segments_run, total);
    return result;
  }

  // Pending states are in the order of the tokens; K/V beyond the new length are overwritten before they are read.
  void rewind(std::int64_t length) override {
    for (std::int64_t& segment_length : lengths_) segment_length = std::min(segment_length, length);
  }

  void set_thresholds(std::vector<float> const& thresholds) override {
    for (std::size_t k = 0; k < thresholds.size(); ++k) buffers_->set_threshold(k, thresholds[k]);
  }

  std::vector<std::int64_t> const& lengths() const override { return lengths_; }
  std::int64_t limit() const override {
    std::int64_t const capacity = backend_.manifest().networks->capacity;
    return std::min(backend_.manifest().model.context_length.value_or(capacity), capacity);
  }
  std::int64_t capacity() const override { return limit(); }

 private:
  SegmentBackend& backend_;
  std::unique_ptr<SequenceBuffers> buffers_;
  std::vector<std::int64_t> const depths_;
  std::int64_t const max_pending_;
  std::vector<std::int64_t> lengths_;
  std::vector<float> scores_;
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
  return std::make_unique<SequenceBuffers>(specs_, open_device_(), manifest());
}

void SegmentBackend::give_back(std::unique_ptr<SequenceBuffers> buffers) {
  std::lock_guard<std::mutex> const lock(mutex_);
  free_.push_back(std::move(buffers));
}

}  // namespace tide

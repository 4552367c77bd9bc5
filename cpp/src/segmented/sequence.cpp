// And one sequence on it: decides, after every router, whether the next segment runs. The same machine as in the
// branched graph: a token that exits leaves its hidden state waiting before the next segment, a later token takes all
// that wait along. Where the memory is and what runs the networks is the lane's affair.
#include "segmented/segment_backend.h"

#include <algorithm>
#include <limits>

#include "tide/errors.h"

namespace tide {
namespace {

class SegmentedSequence final : public Sequence {
 public:
  SegmentedSequence(SegmentSession& session, std::unique_ptr<Lane> lane, std::vector<float> const& thresholds,
                    std::int64_t max_pending)
      : session_(session),
        lane_(std::move(lane)),
        depths_(session.manifest().depths()),
        max_pending_(max_pending),
        lengths_(depths_.size()),
        scores_(thresholds.size()) {
    set_thresholds(thresholds);
  }
  ~SegmentedSequence() override { session_.give_back(std::move(lane_)); }

  StepResult step(std::int64_t const* ids, std::size_t, std::int64_t after, std::int64_t logits_to_keep,
                  bool full) override {
    std::int64_t const keep = std::min(logits_to_keep, after - lengths_.back());
    std::size_t ran = 0;
    for (; ran < lengths_.size(); ++ran) {
      std::int64_t const length = lengths_[ran], count = after - length;
      bool const forced = full || count > max_pending_;
      if (ran > 0 && !forced && lane_->verdict(ran - 1).leaves) break;
      std::int64_t const behind = ran + 1 < lengths_.size() ? lengths_[ran + 1] : length;
      lane_->run(ran, ids, count, length, length - behind, keep);
    }
    // Of a token that left while a segment was forced to run behind it, the first exit counts.
    std::fill(scores_.begin(), scores_.end(), std::numeric_limits<float>::quiet_NaN());
    std::size_t left = ran - 1;
    for (std::size_t k = std::min(ran, scores_.size()); k-- > 0;) {
      Verdict const verdict = lane_->verdict(k);
      scores_[k] = verdict.score;
      if (verdict.leaves && !full) left = k;
    }
    bool const several = left + 1 == lengths_.size() && keep > 1;
    StepResult result;
    result.logits = several ? lane_->rows() : lane_->logits(left);
    result.rows = several ? static_cast<std::size_t>(keep) : 1;
    result.vocabulary = static_cast<std::size_t>(session_.manifest().model.vocab_size);
    result.exit_layer = depths_[left];
    result.segments_run = static_cast<std::int64_t>(ran);
    result.scores = scores_.data();
    std::fill_n(lengths_.begin(), ran, after);
    return result;
  }

  // What waits lies in the order of the tokens, so fewer wait; what the K/V buffers hold beyond is written over before
  // it is read.
  void rewind(std::int64_t length) override {
    for (std::int64_t& own : lengths_) own = std::min(own, length);
  }

  void set_thresholds(std::vector<float> const& thresholds) override {
    for (std::size_t k = 0; k < thresholds.size(); ++k) lane_->set_threshold(k, thresholds[k]);
  }

  std::vector<std::int64_t> const& lengths() const override { return lengths_; }
  std::int64_t limit() const override {
    std::int64_t const held = session_.manifest().networks->capacity;
    return std::min(session_.manifest().model.context_length.value_or(held), held);
  }
  std::int64_t capacity() const override { return limit(); }

 private:
  SegmentSession& session_;
  std::unique_ptr<Lane> lane_;
  std::vector<std::int64_t> const depths_;
  std::int64_t const max_pending_;
  std::vector<std::int64_t> lengths_;
  std::vector<float> scores_;
};

// The pending tokens a bundle is meant for and the new one, in the padded run over them.
std::int64_t waiting_rows(Manifest const& manifest) {
  std::int64_t const capacity = manifest.networks->capacity;
  return padded(std::min(manifest.max_pending, capacity - 1) + 1, 0, capacity, capacity);
}

}  // namespace

SegmentSession::SegmentSession(Bundle bundle, std::vector<NetworkSpec> specs, std::function<LaneParts()> open_lane)
    : Session(std::move(bundle)),
      specs_(std::move(specs)),
      waiting_rows_(waiting_rows(manifest())),
      open_lane_(std::move(open_lane)) {}

std::unique_ptr<Sequence> SegmentSession::start(std::vector<float> const& thresholds, std::int64_t max_pending,
                                                std::int64_t) {
  return std::make_unique<SegmentedSequence>(*this, take(), thresholds, max_pending);
}

std::unique_ptr<Lane> SegmentSession::take() {
  std::unique_ptr<Lane> lane;
  {
    std::lock_guard<std::mutex> const lock(mutex_);
    if (!free_.empty()) {
      lane = std::move(free_.back());
      free_.pop_back();
    } else {
      free_.reserve(++lanes_);  // giving it back must not fail
    }
  }
  if (lane != nullptr) {
    lane->clear();
    return lane;
  }
  return std::make_unique<Lane>(specs_, open_lane_(), *manifest().networks, waiting_rows_);
}

void SegmentSession::give_back(std::unique_ptr<Lane> lane) {
  std::lock_guard<std::mutex> const lock(mutex_);
  free_.push_back(std::move(lane));
}

}  // namespace tide

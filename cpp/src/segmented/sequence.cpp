// One sequence over networks of one segment each: a step of one slot.
#include "segmented/backend.h"
#include "segmented/steps.h"

namespace tide {
namespace {

class SegmentedSequence final : public Sequence {
 public:
  SegmentedSequence(SegmentBackend& backend, std::unique_ptr<SegmentBuffers> buffers, ExitRule rule)
      : backend_(backend), steps_(std::move(buffers), backend.manifest()), slots_(1) {
    slots_[0] = {std::make_unique<SequenceState>(backend.manifest()), std::move(rule)};
  }
  ~SegmentedSequence() override { backend_.give_back(steps_.take_buffers()); }

  StepResult step(std::int64_t const* ids, std::size_t count, std::int64_t, std::int64_t logits_to_keep,
                  bool full) override {
    request_.ids.assign(ids, ids + count);
    request_.logits_to_keep = logits_to_keep;
    request_.full = full;
    slots_[0].sequence->candidates = candidates;
    slots_[0].sequence->states = states;
    slots_[0].sequence->scores = scores;
    return steps_.step(slots_, {{0, request_, true}}, 1.0, true)[0];
  }

  void rewind(std::int64_t length) override { slots_[0].sequence->rewind(length); }
  void set_thresholds(std::vector<float> const& thresholds) override { slots_[0].rule.thresholds = thresholds; }
  std::vector<std::int64_t> const& lengths() const override { return slots_[0].sequence->lengths; }
  std::int64_t limit() const override { return steps_.capacity(); }

 private:
  SegmentBackend& backend_;
  SegmentedSteps steps_;
  std::vector<Slot> slots_;  // one
  StepRequest request_;
};

}  // namespace

std::unique_ptr<Sequence> SegmentBackend::start(std::vector<float> const& thresholds, std::int64_t max_pending) {
  return std::make_unique<SegmentedSequence>(*this, take(idle_, 1), ExitRule{thresholds, max_pending});
}

}  // namespace tide

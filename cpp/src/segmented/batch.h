// Steps several sequences over networks of one segment each, in the slots of one set of buffers.
#pragma once

#include <vector>

#include "segmented/backend.h"
#include "segmented/steps.h"

namespace tide {

class SegmentedBatch final : public Batch {
 public:
  // An empty batch of so many slots; see `Backend::start_batch`.
  SegmentedBatch(SegmentBackend& backend, std::unique_ptr<SegmentBuffers> buffers, double compaction_threshold,
                 std::size_t slots);
  ~SegmentedBatch() override;

  std::size_t free_slots() const override;

  // See `Batch::join`. It is the first free slot, because adjacent slots run in one run.
  std::size_t join(std::vector<double> const& thresholds, std::int64_t max_pending) override;

  void leave(std::size_t slot) noexcept override;
  Sequence& sequence(std::size_t slot) override { return *slots_[slot]; }
  std::vector<StepResult> step(std::vector<SlotRequest> const& requests) override;

 private:
  SegmentBackend& backend_;
  SegmentedSteps steps_;
  double const compaction_threshold_;
  Slots slots_;
};

}  // namespace tide

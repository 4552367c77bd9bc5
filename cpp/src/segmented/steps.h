// Steps sequences over networks of one segment each: after every router, the depth rule selects which continue.
// `SegmentBuffers` holds the memory and runs the networks; `DeviceStep` runs a whole step that a GPU has seen before.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "sequence.h"
#include "segmented/device_step.h"
#include "segmented/memory.h"

namespace tide {

// The sequences in the slots of buffers; null: a slot is free.
using Slots = std::vector<std::unique_ptr<Sequence>>;

// May be used by one thread at a time.
class SegmentedSteps {
 public:
  // `manifest` must outlive it.
  SegmentedSteps(std::unique_ptr<SegmentBuffers> buffers, Manifest const& manifest);

  SegmentBuffers& buffers() const { return *buffers_; }
  std::unique_ptr<SegmentBuffers> take_buffers() { return std::move(buffers_); }  // at the end
  std::int64_t capacity() const { return capacity_; }                             // tokens a sequence can have

  // See `Batch::step`. slots: as many as the buffers have, or the first of them.
  std::vector<StepResult> step(Slots& slots, std::vector<SlotRequest> const& requests, double compaction_threshold);

 private:
  // One sequence in a step.
  struct Running {
    std::size_t slot;
    SlotRequest const* request;
    Sequence* sequence;
    std::vector<std::int64_t> before;  // its lengths
    std::int64_t total;                // its tokens, the new ones included
    std::int64_t first;                // position that gets logits
    std::int64_t start = 0;            // position of the first row of its last run through the last segment
    std::int64_t const* ids;           // of segment 0's next run
    std::size_t segments_run = 0;      // segments 0 .. segments_run - 1 ran over it
    std::optional<std::size_t> exit{};  // the segment after which it exits
  };
  using Steps = std::vector<Running*>;

  std::vector<Running> begin(Slots& slots, std::vector<SlotRequest> const& requests);
  void run_first_parts(Running& one);
  Steps scheduled(std::size_t k, std::vector<Running>& all, Steps const& ran, double compaction_threshold) const;
  bool run_on_device(std::vector<Running>& all, double compaction_threshold, bool scores);
  void run_segments(std::vector<Running>& all, double compaction_threshold, bool scores);
  void run(std::size_t k, Steps const& scheduled, std::vector<float> const& thresholds, bool verdict);
  void add_rows(Running const& one, std::int64_t first_row, std::int64_t count);
  void add_final_rows(Running const& one);
  void run_head(std::vector<Running>& all);
  void queue_states(std::vector<Running> const& all, std::size_t least);
  StateRows final_states(Running const& one);
  StateRows exit_state(Running const& one);
  StepResult result(Running const& one);

  std::unique_ptr<SegmentBuffers> buffers_;
  Manifest const& manifest_;
  std::vector<std::int64_t> const depths_;
  std::int64_t const capacity_, max_pending_;
  std::vector<std::vector<std::int64_t>> lengths_;  // by segment, of every slot
  std::vector<HeadRow> rows_;                       // that the head is to run over
  std::vector<PositionLogits> results_;             // by slot
  std::vector<std::vector<float>> states_;          // by slot, final states of the step so far, where they are asked for
  std::vector<std::vector<float>> exit_states_;     // by slot, what the head read of the last token, where it is asked for
  std::vector<float> scores_;
};

}  // namespace tide

// Steps sequences whose K/V lie in a device's buffers, in the slots of one set of them. `SegmentBuffers` holds the memory and
// runs the networks; `DeviceStep` runs a whole step that a GPU has seen before.
#pragma once

#include <memory>
#include <vector>

#include "segment_walk.h"
#include "segmented/backend.h"
#include "segmented/device_step.h"
#include "segmented/memory.h"

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

  void leave(std::size_t slot) noexcept override { slots_[slot].reset(); }
  Sequence& sequence(std::size_t slot) override { return *slots_[slot]; }
  std::vector<StepResult> step(std::vector<SlotRequest> const& requests) override;

 private:
  // One sequence in a step.
  struct Running : RunningSequence {
    std::int64_t first;             // position that gets logits
    std::int64_t const* ids;        // of segment 0's next run
    std::int64_t start = 0;         // position of the first row of its last run through the last segment
    float score = 0;                // of its last token, by the last router whose verdict was read

    std::size_t slot() const { return request->slot; }
  };
  using Steps = std::vector<Running*>;

  std::vector<StepResult> run_step(std::vector<SlotRequest> const& requests);
  std::vector<Running> begin(std::vector<SlotRequest> const& requests);
  void run_first_parts(Running& one);
  bool run_on_device(std::vector<Running>& all, bool scores);
  void run(std::size_t k, Steps const& scheduled, bool verdict);
  void run_and_decide(std::size_t k, Steps const& scheduled, bool scores);
  bool is_open(Running const& one, std::size_t k, bool scores) const;
  void note_score(Running& one, std::size_t k, float given);
  void add_rows(Running const& one, std::int64_t first_row, std::int64_t count);
  void add_final_rows(Running const& one);
  void run_head(std::vector<Running>& all);
  void queue_exit_states(std::vector<Running> const& all, std::size_t least);
  ExitStateRows final_states(Running const& one);
  ExitStateRows exit_state(Running const& one);
  StepResult result(Running const& one) const;

  SegmentBackend& backend_;
  std::unique_ptr<SegmentBuffers> buffers_;
  double const compaction_threshold_;
  std::vector<std::int64_t> const depths_;
  std::int64_t const capacity_, max_pending_;
  bool const cumulative_;  // scores are (`cumulative_score`)
  std::vector<std::unique_ptr<Sequence>> slots_;    // null: free
  std::vector<std::vector<std::int64_t>> lengths_;  // by segment, of every slot, as far as the step has come
  std::vector<HeadRow> rows_;                       // that the head is to run over
  std::vector<PositionLogits> results_;             // by slot
  std::vector<std::vector<float>> final_states_;    // by slot, final states of the step so far, where they are asked for
  std::vector<std::vector<float>> exit_states_;     // by slot, what the head read of the last token, where it is asked for
  std::vector<float> scores_;                       // of the routers that decided in a step of one sequence, else NaN
};

}  // namespace tide

// Steps several sequences at once: after every segment it decides, by decoding/depth_rule.h, which of them run the next.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "sequence.h"
#include "packed/segment.h"
#include "packed/sequence.h"
#include "tide/state.h"

namespace tide {

// Sequences in `sessions->slots` slots, and the buffers of their steps.
class PackedBatch : public KvBatch {
 public:
  // compaction_threshold: if a smaller share of the step's sequences needs a segment, only those run it; else all with
  //     pending tokens run it.
  // start_lone: how a step of one sequence runs faster than on `sessions`.
  PackedBatch(std::shared_ptr<BatchSessions> sessions, Manifest const& manifest, double compaction_threshold,
              StartLone start_lone);

  std::size_t free_slots() const override { return free_.size(); }
  std::size_t join(std::vector<double> const& thresholds, std::int64_t max_pending) override;
  void leave(std::size_t slot) noexcept override;
  PackedSequence& sequence(std::size_t slot) override { return *sequences_[slot]; }
  std::vector<StepResult> step(std::vector<SlotRequest> const& requests) override;
  std::vector<char> read_kv(std::size_t slot, std::int64_t start, std::int64_t stop) const override;
  void write_kv(std::size_t slot, std::vector<std::vector<char> const*> const& blocks, std::int64_t size,
                std::int64_t length) override;

 protected:
  virtual std::vector<StepResult> run_step(std::vector<SlotRequest> const& requests);

  // One sequence in a step.
  struct SlotStep {
    SlotRequest const* request;
    PackedSequence* sequence;
    std::int64_t total;                    // its tokens, the new ones included
    std::int64_t count;                    // its tokens in the last segment's run over it
    std::size_t start = 0;                 // index of the first of these in that run
    std::size_t segments_run = 0;          // segments 0 .. segments_run - 1 ran over it
    float threshold = static_cast<float>(kNeverExit);  // of the segment that runs next, for the last token's score
    std::optional<std::size_t> exit{};     // the segment after which it exits
    std::vector<float> exit_states{};      // [m, D'], the head's input
    std::vector<float> pending_states{};   // [n, D], pending after the step before the first segment that did not run
  };
  using Steps = std::vector<SlotStep*>;

  // Makes room for the new tokens and gathers their ids.
  std::vector<SlotStep> begin(std::vector<SlotRequest> const& requests);

  // Runs segment k over `scheduled`, whose `count` is set. logits: last positions of each to return exit states of.
  // input: states [N, D], not read by the first segment.
  void run(std::size_t k, Steps const& scheduled, std::vector<std::int64_t> const& logits, float* input);

  // Runs the head on the exit states.
  std::vector<StepResult> results(std::vector<SlotStep> const& all);

  // A sequence's new hidden states [count, D] in segment k's last run.
  float const* new_states(std::size_t k, SlotStep const& one) const {
    return segments_[k]->hidden.data() + one.start * hidden_size_;
  }
  std::size_t floats(std::int64_t tokens) const { return static_cast<std::size_t>(tokens) * hidden_size_; }

  std::shared_ptr<BatchSessions> const sessions_;
  Manifest const& manifest_;
  std::vector<std::int64_t> const depths_;
  std::size_t const hidden_size_;
  std::vector<std::unique_ptr<SegmentRun>> segments_;
  std::vector<float> input_;  // of a segment, unless the previous segment's output is the input
  Ort::MemoryInfo const memory_ = Ort::MemoryInfo::cpu();

 private:
  bool runs_alone(SlotRequest const& request) const;
  StepResult step_alone(SlotRequest const& request);
  void bind();
  Steps still_active(Steps const& ran, std::size_t k) const;
  float* gather(std::size_t k, Steps const& scheduled, bool all_of_previous);
  void note_exits(std::size_t k, Steps const& scheduled, std::vector<std::int64_t> const& logits);
  void commit(std::vector<SlotStep>& all);

  double const compaction_threshold_;
  StartLone const start_lone_;
  PackedSequence padding_;  // in slots without a sequence
  std::vector<std::unique_ptr<PackedSequence>> sequences_;  // by slot
  std::vector<std::unique_ptr<LoneSequence>> lone_;  // by slot, of sequences that were stepped alone
  std::vector<std::int64_t> bound_;  // by slot: the capacity of its buffers that are bound; kUnbound: others are
  std::vector<std::size_t> free_;                           // slots; the next is the last
  std::vector<std::int64_t> ids_;
  std::vector<float> exit_states_;
  Ort::Value logits_{nullptr};
};

}  // namespace tide

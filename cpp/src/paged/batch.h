// Steps sequences whose K/V lie in pages of one pool: runs ONNX Runtime's networks of one segment each.
#pragma once

#include <memory>
#include <vector>

#include "paged/run.h"
#include "paged/paged_sequence.h"
#include "segment_walk.h"
#include "tide/state.h"

namespace tide {

// Sequences in slots, and the buffers of their steps.
class PagedBatch final : public Batch {
 public:
  // `networks`, `manifest`, `pool` and `adapters` must outlive it.
  //
  // compaction_threshold: if a smaller share of the step's sequences needs a segment, only those run it; else all with
  //     pending tokens run it.
  PagedBatch(Networks& networks, Manifest const& manifest, PagePool& pool, Adapters const& adapters,
             double compaction_threshold, std::size_t slots);

  std::size_t free_slots() const override { return free_.size(); }
  std::int64_t max_tokens() const override { return pool_.max_tokens(); }
  std::size_t join(std::vector<double> const& thresholds, std::int64_t max_pending) override;
  void leave(std::size_t slot) noexcept override;
  PagedSequence& sequence(std::size_t slot) override { return *sequences_[slot]; }
  std::vector<StepResult> step(std::vector<SlotRequest> const& requests) override;

  PagePool& pool() const { return pool_; }
  void check(std::vector<Page>& pages, std::vector<Page>& places) const;  // see invariants.cpp

 private:
  // One sequence in a step.
  struct Running : RunningSequence {
    std::int64_t count;                  // its tokens in the last segment's run over it
    std::size_t start = 0;               // index of the first of these in that run
    std::size_t logits = 1;              // rows of the head's input
    std::vector<float> exit_states{};    // [logits, D'], the head's input
    std::vector<float> final_states{};   // [n, D'] or [n, H], of all tokens of the last segment, where they are asked for
    std::vector<float> scores{};         // by checkpoint, the router's, where they are asked for
    std::vector<float> hidden{};         // [n, D], after the last segment that ran, unless it was the model's last

    PagedSequence& paged() const { return static_cast<PagedSequence&>(*sequence); }
  };
  using Steps = std::vector<Running*>;

  std::vector<StepResult> run_step(std::vector<SlotRequest> const& requests);
  std::vector<Running> begin(std::vector<SlotRequest> const& requests);
  void run(std::size_t k, Steps const& scheduled, bool all_of_previous);
  float* gather(std::size_t k, Steps const& scheduled, bool all_of_previous);
  void note_exits(std::size_t k, Steps const& scheduled, std::vector<Part> const& parts);
  std::vector<StepResult> results(std::vector<Running>& all);
  void commit(std::vector<Running>& all);

  // Whether the head's input of all tokens that the last segment runs over is read.
  bool reads_all(Sequence const& sequence) const {
    return sequence.states || (sequence.draft_states && networks_.draft_size() == 0);
  }

  // A sequence's new hidden states [count, D] in segment k's last run.
  float const* new_hidden(std::size_t k, Running const& one) const {
    return segments_[k]->hidden.data() + one.start * hidden_size_;
  }
  std::size_t floats(std::int64_t tokens) const { return static_cast<std::size_t>(tokens) * hidden_size_; }

  Networks& networks_;
  Manifest const& manifest_;
  PagePool& pool_;
  double const compaction_threshold_;
  std::vector<std::int64_t> const depths_;
  std::size_t const hidden_size_, final_size_;  // of hidden states between segments, and of those that the drafter reads
  std::vector<std::unique_ptr<NetworkRun>> segments_;
  std::vector<std::unique_ptr<PagedSequence>> sequences_;   // by slot
  std::vector<std::size_t> free_;                           // slots; the next is the last
  std::vector<std::int64_t> ids_;
  std::vector<float> input_;  // of a segment, unless the previous segment's output is the input
  std::vector<float> exit_states_;
  Ort::MemoryInfo const memory_ = Ort::MemoryInfo::cpu();
  Ort::Value logits_{nullptr};
};

}  // namespace tide

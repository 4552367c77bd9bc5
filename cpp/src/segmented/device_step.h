// Runs a step in one launch and one wait: runs of all segments and of the head, recorded together.
//
// If a token may exit, or some are pending, the device decides after each segment whether the next one runs and over how many
// tokens (`step_decision.h`); otherwise it decides nothing, and no decision is copied. So that there are few recordings, a run
// is over the smallest block of 1, 2, 4, ... slots, at a multiple of that, with all slots of the step; those that do not need
// it are padding.
#pragma once

#include <optional>
#include <vector>

#include "segmented/memory.h"

namespace tide {

// One sequence in a step.
struct DeviceRequest {
  std::size_t slot;
  std::int64_t total;             // its tokens, the new ones included
  std::vector<float> thresholds;  // by checkpoint; all above 1: it runs through all segments
  std::int64_t max_pending;
  bool verifies;
  std::int64_t const* ids;  // the new tokens
};

// May be used by one thread at a time.
class DeviceStep {
 public:
  static constexpr std::int64_t kMaxTokens = 64;  // of a slot: a run over more, of a prompt, takes longer than its launch

  // `buffers` must outlive it. Throws GenerationError: the device has not enough memory.
  explicit DeviceStep(SegmentBuffers& buffers);

  // Queues a step and returns true; or returns false where it must be run segment by segment: its runs are too large, or
  // have come for the first time.
  //
  // slots: ascending.
  // lengths: by segment, tokens in the K/V cache of every slot.
  // scores: whether the router's are read, of the only slot.
  // rows: that the head runs over if the slots do not exit, and reorders.
  // Throws GenerationError: the device has not enough memory, or failed.
  bool queue(std::vector<DeviceRequest> const& slots, std::vector<std::vector<std::int64_t>> const& lengths,
             double compaction_threshold, bool scores, std::vector<HeadRow>& rows);

  // Whether a step that was not queued is recorded when it comes again, so that its runs alone need not be.
  bool comes_again() const { return comes_again_; }

  // Waits for it, and appends the head's results: one for a slot that has those of its exit. Throws GenerationError: a run
  // failed.
  void finish(std::vector<HeadRow>& rows);

  // Of the last step, once it is finished: the segments that ran over a slot, and the one whose exit it has the logits of.
  std::size_t segments_run(std::size_t slot) const;
  std::optional<std::size_t> exit(std::size_t slot) const;

  // The router's score of the only slot after segment k, which ran.
  float score(std::size_t k) const { return outcomes_.host<float>(kScores)[k * pitch_]; }

 private:
  enum Input : std::size_t {  // parts of what is copied to the device, by segment and slot where networks read them
    kLengths, kLast, kPending, kThreshold, kShare, kRules, kCounts, kPlanned, kChoices, kIds
  };
  enum Output : std::size_t { kOutcomes, kScores, kFlags };  // and of what is copied to the host

  // The sizes of a step.
  struct Shape {
    std::size_t start, slots;       // the slots that its runs are over
    std::int64_t tokens, pending;  // of segment 0 of each, padded; that may be pending before each later one
    std::int64_t keys;             // of the K/V buffers that attention reads
    bool decides, copies_scores;
  };

  bool plan(std::vector<DeviceRequest> const& slots, std::vector<std::vector<std::int64_t>> const& lengths);
  void fill(std::vector<DeviceRequest> const& slots, std::vector<std::vector<std::int64_t>> const& lengths,
            double compaction_threshold, std::vector<HeadRow> const& rows);
  std::int64_t most(std::size_t k) const;
  void run(std::size_t k, std::int64_t tokens) const;
  void run_first() const;
  void run_last() const;
  ChosenWork work() const;
  std::size_t place(std::size_t k, std::size_t number) const { return k * pitch_ + number; }

  SegmentBuffers& buffers_;
  Device& device_;
  std::size_t const segments_, pitch_;  // elements by segment: an aligned row for every slot
  Block inputs_, outcomes_;
  bool queued_ = false;  // the queue may not have read `inputs_` yet
  bool comes_again_ = false;
  Shape shape_{};
  Head::Plan head_{};
};

}  // namespace tide

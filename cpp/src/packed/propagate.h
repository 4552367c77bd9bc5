// Steps several sequences at once where K/V are propagated.
//
// A sequence that exits has a frozen hidden state: deeper segments run without it, and it gets the keys and values that
// their layers make of that state, which a small network computes for all that skip a segment at once. No tokens are
// ever pending, so that there is no choice to make as in `PackedBatch`.
#pragma once

#include "packed/batch.h"

namespace tide {

// As `PackedBatch`; every segment's K/V buffers hold all tokens of a sequence.
class PropagatingBatch final : public PackedBatch {
 public:
  PropagatingBatch(std::shared_ptr<BatchSessions> sessions, Manifest const& manifest, StartLone start_lone)
      : PackedBatch(std::move(sessions), manifest, 1.0, std::move(start_lone)) {}

 private:
  // As in `PackedBatch`, but returns one row of logits for each sequence: there is no lossless mode. A sequence's first
  // step and every step of several tokens run every segment.
  std::vector<StepResult> run_step(std::vector<SlotRequest> const& requests) override;
  void skip(std::size_t k, Steps const& exited);

  std::vector<float> frozen_states_;  // [m, D], of the sequences that exited
  std::vector<std::int64_t> positions_;
};

// Starts an empty batch for the bundle's kind of K/V cache; see `PackedBatch`. Throws GenerationError: not enough memory.
std::unique_ptr<PackedBatch> start_batch(std::shared_ptr<BatchSessions> sessions, Manifest const& manifest,
                                         double compaction_threshold, StartLone start_lone);

}  // namespace tide

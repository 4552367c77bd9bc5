// The step over several sequences where K/V are propagated.
//
// A sequence that leaves stands still: the segments behind go on without it, and it gets the keys and values that their
// layers make of the state it left with, which a small network computes for all who skip a segment at once. Nothing
// waits and nobody catches up, so there is no choice to make as in `Batch`.
#pragma once

#include "packed/batch.h"

namespace tide {

// As `Batch`; every sequence has as many tokens in each segment's K/V buffers as it has tokens.
class PropagatingBatch final : public Batch {
 public:
  PropagatingBatch(std::shared_ptr<BatchSessions> sessions, Manifest const& manifest,
                   std::vector<double> const& thresholds)
      : Batch(std::move(sessions), manifest, thresholds, 0, 1.0) {}

  // As `Batch::step`, but the result is always about a sequence's own exit, and none may ask for more: there is no
  // lossless mode. A sequence's first step runs every segment over it, as does each of several tokens.
  std::vector<StepResult> step(std::vector<Wanted> const& wanted) override;

 private:
  void skip(std::size_t k, Some const& still);

  std::vector<float> still_states_;  // that those who left stand still at, [m, D]
  std::vector<std::int64_t> positions_;
};

}  // namespace tide

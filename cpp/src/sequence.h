// One sequence on whatever runs the bundle: what a `State` is made of. `GraphSequence` has its depth decided in the
// branched graph, `SegmentedSequence` decides by itself which network of one segment runs.
#pragma once

#include <cstdint>
#include <vector>

#include "tide/state.h"

namespace tide {

// `State` has checked what it is given; a step that throws leaves the sequence as it was.
class Sequence {
 public:
  virtual ~Sequence() = default;

  // As `State::step`; `after` are the tokens of the sequence with these.
  virtual StepResult step(std::int64_t const* ids, std::size_t count, std::int64_t after, std::int64_t logits_to_keep,
                          bool full) = 0;
  virtual void rewind(std::int64_t length) = 0;
  virtual void set_thresholds(std::vector<float> const& thresholds) = 0;

  virtual std::vector<std::int64_t> const& lengths() const = 0;  // tokens in each segment's K/V, shallowest first
  virtual std::vector<std::int64_t> const& computed() const { return lengths(); }  // that each segment has run over
  virtual std::int64_t limit() const = 0;                                          // tokens it may have
  virtual std::int64_t capacity() const = 0;                                       // before K/V buffers grow
};

}  // namespace tide

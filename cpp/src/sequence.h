// The interface of one sequence on a backend, behind `State`. In the branched graph the graph decides how deep a token
// goes (branched/sequence.cpp); with a network per segment the sequence decides (segmented/sequence.cpp).
#pragma once

#include <cstdint>
#include <vector>

#include "tide/state.h"

namespace tide {

// `State` has checked all arguments. A step that throws leaves the sequence unchanged.
class Sequence {
 public:
  virtual ~Sequence() = default;

  // As `State::step`; `total` is the sequence's number of tokens including the new ones.
  virtual StepResult step(std::int64_t const* ids, std::size_t count, std::int64_t total, std::int64_t logits_to_keep,
                          bool full) = 0;
  virtual void rewind(std::int64_t length) = 0;
  virtual void set_thresholds(std::vector<float> const& thresholds) = 0;

  virtual std::vector<std::int64_t> const& lengths() const = 0;  // tokens in each segment's K/V, shallowest first
  virtual std::vector<std::int64_t> const& computed() const { return lengths(); }  // tokens each segment has run over
  virtual std::int64_t limit() const = 0;                                          // tokens it may have, at most
  virtual std::int64_t capacity() const = 0;  // tokens that the K/V buffers hold before they grow
};

}  // namespace tide

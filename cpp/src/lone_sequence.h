// A sequence that takes over from another one: a batch's, when a step has no other.
#pragma once

#include <cstdint>
#include <vector>

#include "sequence.h"

namespace tide {

// A sequence on the graph of one sequence that can go on where another one on the same K/V buffers has come.
class LoneSequence : public Sequence {
 public:
  // Goes on after these tokens. pending: states [n, D] before each segment; none before the first.
  virtual void resume(std::vector<std::int64_t> const& lengths, std::vector<std::int64_t> const& computed,
                      std::vector<std::vector<float>> const& pending) = 0;

  // Copies of the states that are pending, as in `resume`.
  virtual std::vector<std::vector<float>> pending_states() const = 0;
};

}  // namespace tide

// Moves measured costs slowly to those of the steps that are run: what was measured while other programs ran, or with a
// shorter text, comes right.
//
// Only the ratio to what other steps took of late counts, so that a slower machine changes nothing. No single reading moves a
// cost by more than half a percent of a step, whatever the clock does.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "decoding/draft_costs.h"

namespace tide {

class CostCorrection {
 public:
  // After a step of full depth over so many tokens, of one sequence or of several.
  void ran(StepCosts& costs, std::size_t tokens, double seconds) noexcept;

  // After a step over one token that exited at this checkpoint.
  void exited(StepCosts& costs, std::size_t checkpoint, double seconds) const noexcept;

  // After a draft of the drafter for one sequence.
  void drafted(StepCosts& costs, double seconds) const noexcept;

  std::int64_t steps() const { return steps_; }  // of full depth

 private:
  // How much longer than `cost` in steps a reading is, as a logarithm that is cut off; 0: it says nothing.
  double surprise(double cost, double seconds) const noexcept;

  static constexpr std::size_t kFirst = 32;  // steps, which change no cost

  std::array<double, kFirst> first_{};  // what they show of `unit_`
  double unit_ = 0;  // seconds of a step of full depth over one token, of late; 0: not yet known
  std::int64_t steps_ = 0;
};

}  // namespace tide

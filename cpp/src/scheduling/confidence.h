// Bounds the mean of a sequence of losses, at all times together.
//
// An empirical-Bernstein confidence sequence (Howard, Ramdas, McAuliffe and Sekhon, "Time-uniform, nonparametric,
// nonasymptotic confidence sequences", arXiv 1810.08240, theorem 4). Let m be the expected loss given all before, b a bet in
// (0, 1), psi(b) = -log(1 - b) - b, and V the sum of the squared differences of every loss to the mean of those before it.
// Then exp(b (sum of losses - sum of m) - psi(b) V) is a supermartingale, so the probability that it ever exceeds 1 / delta is
// at most delta; the same holds with losses and m exchanged. Expected losses may change over time, as in live traffic.
#pragma once

#include <array>
#include <cstdint>

namespace tide {

class ConfidenceSequence {
 public:
  // Each bound is wrong at some time with probability `delta` at most.
  explicit ConfidenceSequence(double delta);

  void add(double loss);  // in [0, 1]

  double upper() const;  // the mean of the expected losses so far is no larger
  double lower() const;  // and no smaller

 private:
  static constexpr std::size_t kBets = 12;  // the smaller ones suit more losses

  double deviation() const;

  std::array<double, kBets> limits_;
  std::int64_t count_ = 0;
  double sum_ = 0, variation_ = 0;
};

}  // namespace tide

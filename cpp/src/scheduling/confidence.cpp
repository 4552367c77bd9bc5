#include "scheduling/confidence.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tide {
namespace {

double bet(std::size_t number) { return 0.95 * std::pow(0.5, static_cast<double>(number)); }
double psi(double bet) { return -std::log1p(-bet) - bet; }

}  // namespace

ConfidenceSequence::ConfidenceSequence(double delta) {
  for (std::size_t i = 0; i < kBets; ++i) {
    double const rank = static_cast<double>(i + 1);  // shares of delta, which add up to less than 1
    limits_[i] = -std::log(delta / (rank * (rank + 1)));
  }
}

void ConfidenceSequence::add(double loss) {
  double const difference = loss - sum_ / static_cast<double>(std::max<std::int64_t>(count_, 1));
  variation_ += difference * difference;
  sum_ += loss;
  ++count_;
}

double ConfidenceSequence::upper() const {
  return count_ == 0 ? 1 : std::min(1.0, (sum_ + deviation()) / static_cast<double>(count_));
}

double ConfidenceSequence::lower() const {
  return count_ == 0 ? 0 : std::max(0.0, (sum_ - deviation()) / static_cast<double>(count_));
}

double ConfidenceSequence::deviation() const {
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < kBets; ++i) least = std::min(least, (limits_[i] + psi(bet(i)) * variation_) / bet(i));
  return least;
}

}  // namespace tide

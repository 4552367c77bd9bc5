#include "decoding/cost_correction.h"

#include <algorithm>
#include <cmath>

namespace tide {
namespace {

constexpr double kMostSurprise = 0.5;   // of a logarithm: a reading 1.65 times as long as expected, or longer
constexpr double kUnitRate = 1.0 / 16;  // of what steps take of late
constexpr double kCostRate = 1.0 / 128; // of costs
constexpr std::size_t kMostRead = 64;   // tokens; of more, costs say nothing

bool is_time(double seconds) { return std::isfinite(seconds) && seconds > 0; }

}  // namespace

void CostCorrection::ran(StepCosts& costs, std::size_t tokens, double seconds) noexcept {
  if (tokens == 0 || tokens > kMostRead || !is_time(seconds)) return;
  double const expected = 1 + further_cost(costs.verify, tokens - 1);
  auto const step = static_cast<std::size_t>(steps_++);
  if (step < kFirst) {
    first_[step] = seconds / expected;
    if (step + 1 < kFirst) return;
    std::sort(first_.begin(), first_.end());
    unit_ = first_[kFirst / 2];
    return;
  }
  double const off = surprise(expected, seconds);
  unit_ *= std::exp(kUnitRate * off);
  if (tokens == 1) return;
  std::size_t nearest = 0;  // of the costs, by the middle between two numbers of tokens
  while (nearest + 1 < costs.verify.size() && 2 * (tokens - 1) > std::size_t{3} << nearest) ++nearest;
  double& cost = costs.verify[nearest];
  cost = std::max(0.0, cost + kCostRate * off * (1 + cost));
  for (std::size_t i = nearest; i > 0; --i) costs.verify[i - 1] = std::min(costs.verify[i - 1], costs.verify[i]);
  for (std::size_t i = nearest + 1; i < costs.verify.size(); ++i) {
    costs.verify[i] = std::max(costs.verify[i], costs.verify[i - 1]);
  }
}

void CostCorrection::exited(StepCosts& costs, std::size_t checkpoint, double seconds) const noexcept {
  if (checkpoint >= costs.exits.size()) return;
  double& cost = costs.exits[checkpoint];
  cost *= std::exp(kCostRate * surprise(cost, seconds));
}

void CostCorrection::drafted(StepCosts& costs, double seconds) const noexcept {
  costs.drafter *= std::exp(kCostRate * surprise(costs.drafter, seconds));
}

double CostCorrection::surprise(double cost, double seconds) const noexcept {
  double const off = std::log(seconds / (unit_ * cost));
  return is_time(seconds) && unit_ > 0 && std::isfinite(off) ? std::clamp(off, -kMostSurprise, kMostSurprise) : 0;
}

}  // namespace tide

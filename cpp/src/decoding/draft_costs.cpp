#include "decoding/draft_costs.h"

namespace tide {
namespace {

constexpr double kFurther = 2.0;  // what a further sequence costs the drafter, in what a further token costs the model

}  // namespace

double further_cost(std::vector<double> const& verify, std::size_t tokens) {
  if (tokens == 0) return 0;
  std::size_t k = 0;
  while (k + 2 < verify.size() && tokens >> (k + 1) > 0) ++k;
  double const known = static_cast<double>(std::size_t{1} << k);
  return verify[k] + (static_cast<double>(tokens) - known) * (verify[k + 1] - verify[k]) / known;
}

double DraftCosts::step(Company const& others) const {
  return (1 + more(others.sequences)) / static_cast<double>(others.sequences + 1);
}

double DraftCosts::verify(Company const& others, std::size_t drafts) const {
  return (more(others.tokens + drafts) - more(others.tokens)) / step(others);
}

double DraftCosts::draft(Company const& others, std::size_t sharing) const {
  double const run = drafter_ * (1 + kFurther * more(sharing - 1));
  return run / static_cast<double>(sharing) / step(others);
}

double DraftCosts::rows(Company const& others, std::size_t count) const {
  double const row = (verify_[4] - verify_[3]) / 8;
  return drafter_ * row * static_cast<double>(count) / step(others);
}

}  // namespace tide

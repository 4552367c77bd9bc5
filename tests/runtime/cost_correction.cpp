// Feeds a CostCorrection what a clock says, and prints the costs that it comes to. See test_cost_correction.py.
#include <cstdlib>
#include <iostream>
#include <string>

#include "decoding/cost_correction.h"

// Lines of "ran TOKENS SECONDS", "exited CHECKPOINT SECONDS" or "drafted SECONDS"; numbers as strtod reads them.
int main() {
  tide::StepCosts costs{{0.4, 0.8}, {0.1, 0.2, 0.3, 0.6, 1.2}, 0.1};
  tide::CostCorrection correction;
  auto const number = [] {
    std::string text;
    std::cin >> text;
    return std::strtod(text.c_str(), nullptr);
  };
  for (std::string what; std::cin >> what;) {
    if (what == "drafted") {
      correction.drafted(costs, number());
      continue;
    }
    auto const count = static_cast<std::size_t>(number());
    if (what == "ran") correction.ran(costs, count, number());
    if (what == "exited") correction.exited(costs, count, number());
  }
  for (double const cost : costs.verify) std::cout << cost << " ";
  for (double const cost : costs.exits) std::cout << cost << " ";
  std::cout << costs.drafter << std::endl;
}

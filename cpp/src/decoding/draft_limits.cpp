#include "decoding/draft_limits.h"

#include <algorithm>
#include <string>

#include "tide/errors.h"

namespace tide {
namespace {

constexpr std::int64_t kMaxLearned = 8;
constexpr double kDrafterCost = 0.1;
constexpr double kHeadCost = 0.1;  // of a step of full depth
constexpr double kWorth = 0.75;    // of such a step, what an exit that is accepted saves

}  // namespace

DraftLimits::DraftLimits(Drafting const& drafting)
    : max_drafts(drafting.max_drafts),
      prompt_lookup(drafting.prompt_lookup),
      drafter(drafting.max_learned.value_or(kMaxLearned)),
      draft_costs(drafting.draft_costs),
      verify_costs(drafting.verify_costs),
      drafter_cost(drafting.drafter_cost.value_or(kDrafterCost)) {}

void DraftLimits::undo(std::int64_t tokens) {
  std::int64_t const most = (tokens - 1) / 2;  // by exits or the drafter, and as many n-grams after them
  for (std::int64_t* const limit : {&max_drafts, &prompt_lookup, &drafter}) *limit = std::min(*limit, most);
}

void check_drafting(Drafting const& drafting, std::size_t checkpoints) {
  auto const require = [](bool holds, char const* what) {
    if (!holds) throw GenerationError(std::string("drafting.") + what);
  };
  auto const costs = [](std::vector<double> const& values) {
    return std::all_of(values.begin(), values.end(), [](double value) { return value >= 0; });
  };
  require(drafting.max_drafts >= 0, "max_drafts must be 0 or more");
  require(drafting.prompt_lookup >= 0, "prompt_lookup must be 0 or more");
  require(drafting.drafter_cost.value_or(0) >= 0, "drafter_cost must be 0 or more");
  require(drafting.max_learned.value_or(0) >= 0, "max_learned must be 0 or more");
  require(drafting.draft_costs.size() >= checkpoints, "draft_costs must have one value per checkpoint");
  require(drafting.verify_costs.size() == 5, "verify_costs must have five values");
  require(costs(drafting.draft_costs), "draft_costs holds a negative value");
  require(costs(drafting.verify_costs), "verify_costs holds a negative value");
}

Drafting default_drafting(Manifest const& manifest) {
  Drafting drafting{manifest.thresholds, 6, 8, {}, {0.13, 0.18, 0.3, 0.54, 1.0}};
  for (std::size_t i = 0; i < manifest.checkpoints.size(); ++i) {
    double const layers = static_cast<double>(manifest.checkpoints[i]);
    double const cost = kHeadCost + layers / static_cast<double>(manifest.model.num_layers);
    if (!(cost + drafting.verify_costs[0] < kWorth)) drafting.thresholds[i] = 1;
    drafting.draft_costs.push_back(cost);
  }
  return drafting;
}

}  // namespace tide

#include "decoding/draft_limits.h"

#include <algorithm>
#include <string>

#include "tide/errors.h"

namespace tide {
namespace {

constexpr std::int64_t kMaxLearned = 8;
constexpr double kDrafterCost = 0.1;
constexpr double kHeadCost = 0.1;  // of a step of full depth

}  // namespace

DraftLimits::DraftLimits(Drafting const& drafting)
    : max_drafts(drafting.max_drafts),
      prompt_lookup(drafting.prompt_lookup),
      drafter(drafting.max_learned.value_or(kMaxLearned)),
      thresholds(drafting.thresholds) {}

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
  bool const given = !drafting.verify_costs.empty() || !drafting.draft_costs.empty() || drafting.drafter_cost;
  require(!given || drafting.draft_costs.size() >= checkpoints, "draft_costs must have one value per checkpoint");
  require(!given || drafting.verify_costs.size() == kVerifyCosts, "verify_costs must have five values");
  require(costs(drafting.draft_costs), "draft_costs holds a negative value");
  require(costs(drafting.verify_costs), "verify_costs holds a negative value");
}

StepCosts assumed_costs(Manifest const& manifest) {
  StepCosts costs{{}, {0.13, 0.18, 0.3, 0.54, 1.0}, kDrafterCost};
  for (std::int64_t const layers : manifest.checkpoints) {
    costs.exits.push_back(kHeadCost + static_cast<double>(layers) / static_cast<double>(manifest.model.num_layers));
  }
  return costs;
}

StepCosts given_costs(Drafting const& drafting) {
  return {drafting.draft_costs, drafting.verify_costs, drafting.drafter_cost.value_or(kDrafterCost)};
}

Drafting default_drafting(Manifest const& manifest) {
  return {std::vector<double>(manifest.checkpoints.size(), 0.0), 6, 8, {}, {}};
}

}  // namespace tide

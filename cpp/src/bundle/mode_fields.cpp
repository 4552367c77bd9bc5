#include "bundle/mode_fields.h"

#include <algorithm>
#include <set>

namespace tide {
namespace {

bool is_share(double value) { return 0 <= value && value <= 1; }
bool are_shares(std::vector<double> const& values) { return std::all_of(values.begin(), values.end(), is_share); }

}  // namespace

std::optional<Drafting> drafting_of(Field const& field) {
  if (field.is_null()) return std::nullopt;
  field.object({"thresholds", "max_drafts", "prompt_lookup", "draft_costs", "verify_costs", "tuning", "drafter_cost",
                "max_learned"},
               {"drafter_cost", "max_learned"});
  Drafting drafting{field["thresholds"].reals(), field["max_drafts"].whole(), field["prompt_lookup"].whole(),
                    field["draft_costs"].reals(), field["verify_costs"].reals()};
  field["tuning"].entries();
  if (field.has("drafter_cost") && !field["drafter_cost"].is_null()) {
    drafting.drafter_cost = field["drafter_cost"].real();
  }
  if (field.has("max_learned") && !field["max_learned"].is_null()) drafting.max_learned = field["max_learned"].whole();
  return drafting;
}

std::optional<AutoMode> auto_mode_of(Field const& field) {
  if (!field.has("auto") || field["auto"].is_null()) return std::nullopt;
  Field const record = field["auto"];
  record.object(
      {"mode", "thresholds", "epsilon", "provider", "exit_speedup", "lossless_speedup", "machine", "evidence", "slots"},
      {"slots"});
  AutoMode measured;
  measured.mode = record["mode"].text();
  measured.thresholds = record["thresholds"].reals();
  measured.epsilon = record["epsilon"].real();
  measured.provider = record["provider"].text();
  if (!record["exit_speedup"].is_null()) measured.exit_speedup = record["exit_speedup"].real();
  if (!record["lossless_speedup"].is_null()) measured.lossless_speedup = record["lossless_speedup"].real();
  measured.machine = record["machine"].text();
  record["evidence"].entries();
  if (record.has("slots") && !record["slots"].is_null()) measured.slots = record["slots"].whole();
  return measured;
}

void check_modes(Manifest const& manifest, Require const& require) {
  std::size_t const points = manifest.checkpoints.size();
  if (manifest.drafting) {
    Drafting const& drafting = *manifest.drafting;
    require(drafting.thresholds.size() == points, "drafting.thresholds", "must have one value per checkpoint");
    require(are_shares(drafting.thresholds), "drafting.thresholds", "must lie in [0, 1]");
    require(drafting.max_drafts >= 0, "drafting.max_drafts", "must be 0 or more");
    require(drafting.prompt_lookup >= 0, "drafting.prompt_lookup", "must be 0 or more");
    require(drafting.draft_costs.size() == points, "drafting.draft_costs", "must have one value per checkpoint");
    require(drafting.verify_costs.size() == 5, "drafting.verify_costs", "must have five values");
    require(drafting.drafter_cost.value_or(0) >= 0, "drafting.drafter_cost", "must be 0 or more");
    require(drafting.max_learned.value_or(0) >= 0, "drafting.max_learned", "must be 0 or more");
    auto const are_costs = [](std::vector<double> const& values) {
      return std::all_of(values.begin(), values.end(), [](double value) { return value >= 0; });
    };
    require(are_costs(drafting.draft_costs), "drafting.draft_costs", "holds a negative value");
    require(are_costs(drafting.verify_costs), "drafting.verify_costs", "holds a negative value");
  }
  if (manifest.auto_mode) {
    AutoMode const& measured = *manifest.auto_mode;
    require(std::set<std::string>{"full", "exit", "lossless"}.count(measured.mode) == 1, "auto.mode",
            "must be one of full, exit, lossless");
    require(measured.thresholds.size() == points, "auto.thresholds", "must have one value per checkpoint");
    require(are_shares(measured.thresholds), "auto.thresholds", "must lie in [0, 1]");
    require(0 <= measured.epsilon && measured.epsilon < 1, "auto.epsilon", "must lie in [0, 1)");
    require(measured.mode != "exit" || measured.exit_speedup, "auto.exit_speedup", "is missing for mode exit");
    require(measured.mode != "lossless" || measured.lossless_speedup, "auto.lossless_speedup",
            "is missing for mode lossless");
    require(measured.slots.value_or(2) >= 2, "auto.slots", "must be 2 or more");
    require(!measured.slots || measured.mode != "full", "auto.slots", "is for modes exit and lossless");
  }
}

}  // namespace tide

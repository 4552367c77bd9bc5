#include "bundle/mode_fields.h"

#include <algorithm>
#include <set>
#include <string>

namespace tide {
namespace {

void check_count(Field const& field, std::vector<double> const& values, std::size_t count) {
  field.require(values.size() == count, "must have " + std::to_string(count) + " values");
}

// Without costs.
Drafting limits_in(Field const& field) {
  Drafting drafting{field["thresholds"].reals(), field["max_drafts"].whole(), field["prompt_lookup"].whole()};
  if (auto const most = field.find("max_learned")) drafting.max_learned = most->whole();
  return drafting;
}

}  // namespace

std::vector<double> shares_of(Field const& field, std::size_t count) {
  std::vector<double> shares = field.reals();
  check_count(field, shares, count);
  bool const within = std::all_of(shares.begin(), shares.end(), [](double share) { return 0 <= share && share <= 1; });
  field.require(within, "must lie in [0, 1]");
  return shares;
}

Drafting drafting_in(Field const& field) {
  Drafting drafting = limits_in(field);
  if (auto const costs = field.find("draft_costs")) drafting.draft_costs = costs->reals();
  if (auto const costs = field.find("verify_costs")) drafting.verify_costs = costs->reals();
  if (auto const cost = field.find("drafter_cost")) drafting.drafter_cost = cost->real();
  return drafting;
}

std::optional<Drafting> drafting_of(Field const& manifest, std::size_t points) {
  auto const field = manifest.find("drafting");
  if (!field) return std::nullopt;
  Drafting drafting = limits_in(*field);  // costs, which older releases wrote, are those of another machine
  shares_of((*field)["thresholds"], points);
  for (char const* const name : {"max_drafts", "prompt_lookup"}) (*field)[name].whole(0);
  if (auto const most = field->find("max_learned")) most->whole(0);
  return drafting;
}

std::optional<AutoMode> auto_mode_of(Field const& manifest, std::size_t points) {
  auto const field = manifest.find("auto");
  if (!field) return std::nullopt;
  AutoMode measured{(*field)["mode"].text(), shares_of((*field)["thresholds"], points), (*field)["provider"].text(),
                    std::nullopt};
  bool const known = std::set<std::string>{"full", "exit", "lossless"}.count(measured.mode) == 1;
  (*field)["mode"].require(known, "must be one of full, exit, lossless");
  if (auto const slots = field->find("slots")) measured.slots = slots->whole(1);
  return measured;
}

}  // namespace tide

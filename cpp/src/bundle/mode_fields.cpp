#include "bundle/mode_fields.h"

#include <algorithm>
#include <set>
#include <string>

namespace tide {
namespace {

constexpr std::size_t kVerifyCosts = 5;

void check_count(Field const& field, std::vector<double> const& values, std::size_t count) {
  field.require(values.size() == count, "must have " + std::to_string(count) + " values");
}

void check_costs(Field const& field, std::vector<double> const& costs, std::size_t count) {
  check_count(field, costs, count);
  bool const positive = std::all_of(costs.begin(), costs.end(), [](double cost) { return cost >= 0; });
  field.require(positive, "holds a negative value");
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
  Drafting drafting{field["thresholds"].reals(), field["max_drafts"].whole(), field["prompt_lookup"].whole(),
                    field["draft_costs"].reals(), field["verify_costs"].reals()};
  if (auto const cost = field.find("drafter_cost")) drafting.drafter_cost = cost->real();
  if (auto const most = field.find("max_learned")) drafting.max_learned = most->whole();
  return drafting;
}

std::optional<Drafting> drafting_of(Field const& manifest, std::size_t points) {
  auto const field = manifest.find("drafting");
  if (!field) return std::nullopt;
  Drafting drafting = drafting_in(*field);
  shares_of((*field)["thresholds"], points);
  check_costs((*field)["draft_costs"], drafting.draft_costs, points);
  check_costs((*field)["verify_costs"], drafting.verify_costs, kVerifyCosts);
  for (char const* const name : {"max_drafts", "prompt_lookup"}) (*field)[name].whole(0);
  if (auto const most = field->find("max_learned")) most->whole(0);
  if (auto const cost = field->find("drafter_cost")) cost->require(cost->real() >= 0, "must be 0 or more");
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

// Requests that a simulation draws, and what each must get.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tide/runtime.h"
#include "world.h"

namespace simulation {

struct Request {
  std::vector<std::int64_t> prompt;
  tide::GenerationConfig config;
  std::optional<double> timeout;
  std::int64_t hook_throws_at = -1;  // the length of the text at which its logits_processor throws; -1: it never does
};

constexpr char const* kHookThrew = "the hook of a simulated request threw";

Request draw(Random& random, bool recurrent);

// Throws std::logic_error: what a request got is not what it gets alone, or what it gets alone is not by the rule.
//
// got: of a request that has ended. whole: by itself, not cancelled, timed out or failed.
void compare(Request const& request, tide::Generation const& got, tide::Generation const& alone, bool whole);
void check_rule(Request const& request, tide::Manifest const& manifest, tide::Generation const& alone);

}  // namespace simulation

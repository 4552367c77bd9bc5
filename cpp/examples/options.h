// Options of the example program, as text: `--name value`. The test driver reads its lines with the same.
#pragma once

#include <string>
#include <vector>

#include "tide/runtime.h"

struct Options {
  std::string bundle;
  std::vector<std::vector<std::int64_t>> prompts;  // in the order given
  tide::LoadOptions load;
  tide::Request request;
  bool help = false;
};

extern char const* const kUsage;

// Throws tide::ConfigError, tide::GenerationError.
Options parse(std::vector<std::string> const& arguments);

// Numbers between commas or white space. Throws tide::ConfigError, which names `option`.
std::vector<std::int64_t> whole_numbers(std::string const& option, std::string const& text);
std::vector<double> real_numbers(std::string const& option, std::string const& text);

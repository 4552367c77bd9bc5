// Parses the example program's command line, `--name value`; the test driver parses its lines with it too.
#pragma once

#include <string>
#include <vector>

#include "tide/runtime.h"

struct Options {
  std::string bundle;
  std::vector<std::vector<std::int64_t>> prompts;  // of token ids, in the order given
  std::vector<std::string> texts;                  // prompts of text, after those of token ids
  tide::LoadOptions load;
  tide::GenerationConfig config;
  bool help = false;
};

std::string usage();

// Throws tide::ConfigError, tide::GenerationError.
Options parse(std::vector<std::string> const& arguments);

// Numbers separated by commas or white space. Throws tide::ConfigError, which names `option`.
std::vector<std::int64_t> whole_numbers(std::string const& option, std::string const& text);
std::vector<double> real_numbers(std::string const& option, std::string const& text);

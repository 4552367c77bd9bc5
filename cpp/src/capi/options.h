// Reads the options of the C interface: JSON objects with the names of the Python package.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>

#include "tide/runtime.h"
#include "tide/scheduler.h"

namespace tide {

// Options of tide_load.
struct OpenOptions {
  LoadOptions load;
  std::optional<std::filesystem::path> tokenizers;  // as in `Engine::tokenizer`
};

// text: a JSON object; nullptr: no options. All throw a TideError that names the option: ConfigError of `open_options`,
// GenerationError of the others.
OpenOptions open_options(char const* text);

// tokenizer: called where an option needs the text of the tokens.
GenerationConfig generation_config(char const* text, std::function<Tokenizer()> const& tokenizer);

SchedulerLimits scheduler_limits(char const* text);

}  // namespace tide

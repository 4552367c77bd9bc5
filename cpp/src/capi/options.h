// Reads the options of the C interface: JSON objects with the names of the Python package.
#pragma once

#include "tide/runtime.h"
#include "tide/scheduler.h"

namespace tide {

// text: a JSON object; nullptr: no options. All throw a TideError that names the option: ConfigError of `load_options`,
// GenerationError of the others.
LoadOptions load_options(char const* text);
GenerationConfig generation_config(char const* text);
SchedulerLimits scheduler_limits(char const* text);

}  // namespace tide

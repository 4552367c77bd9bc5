// Reads the options of the C interface: JSON objects with the names of the Python package.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>

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

// detokenizer: called where an option needs the text of the tokens.
GenerationConfig generation_config(char const* text, std::function<Detokenizer()> const& detokenizer);

// What a scheduler holds at most, and how it audits; none: not.
std::pair<SchedulerLimits, std::optional<AuditConfig>> scheduler_options(char const* text);

// How lossless mode drafts, as a manifest has it.
Drafting drafting_options(char const* text);

// What a checked configuration means, as tide_resolve writes it.
std::string json_of(Engine const& engine, GenerationConfig const& config);

}  // namespace tide

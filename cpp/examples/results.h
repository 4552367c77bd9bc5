// Writes generations as JSON.
#pragma once

#include <string>

#include "tide/runtime.h"

// The fields of an object: tokens, finish_reason, stats, and text and logprobs where they were asked for.
std::string fields(tide::Generation const& generation);

// A JSON string.
std::string json_string(std::string const& text);

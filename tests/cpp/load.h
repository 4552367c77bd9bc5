// A load of many threads on one engine.
#pragma once

#include <cstdint>
#include <new>
#include <string>
#include <vector>

#include "tide/runtime.h"

// What a callback throws, of a base that the runtime itself catches.
struct CallbackError : std::bad_alloc {
  explicit CallbackError(std::int64_t number) : token(number) {}
  std::int64_t token;
};

// Threads draw generations of all modes, of one prompt and of all as a list, until `seconds` are over: read to the end,
// cancelled, or ended by a callback that throws. Each is compared with one of a serial run. Returns JSON: generations
// of each kind, tokens, violations, and physical memory after the first third of the time and at the end.
std::string load_of_threads(tide::Engine const& engine, std::vector<std::vector<std::int64_t>> const& prompts,
                            std::size_t threads, double seconds, unsigned seed);

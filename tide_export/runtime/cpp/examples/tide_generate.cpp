// Generates from a bundle: the least a program needs, and a way to look at a bundle without Python.
#include <iostream>

#include "options.h"

namespace {

std::string as_json(tide::Generation const& generation) {
  std::string tokens;
  for (std::int64_t const token : generation.tokens) tokens += (tokens.empty() ? "" : ", ") + std::to_string(token);
  return "{\"tokens\": [" + tokens + "], \"finish_reason\": \"" + std::string(name_of(generation.finish_reason)) +
         "\", \"stats\": " + generation.stats.json() + "}";
}

}  // namespace

int main(int count, char** given) {
  try {
    Options const options = parse({given + 1, given + count});
    if (options.help) {
      std::cout << kUsage;
      return 0;
    }
    if (options.bundle.empty()) throw tide::ConfigError("no bundle is given: see tide_generate --help");
    tide::Engine const engine = tide::Engine::load(options.bundle, options.load);
    std::cout << as_json(engine.generate(options.prompt, options.request)) << std::endl;
    return 0;
  } catch (std::exception const& error) {  // tide::TideError, or no memory
    std::cerr << "tide_generate: " << error.what() << std::endl;
    return 2;
  }
}

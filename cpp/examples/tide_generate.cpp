// Generates tokens from a bundle, without Python.
#include <chrono>
#include <iostream>

#include "options.h"

namespace {

// The fields of a JSON object.
std::string as_json(tide::Generation const& generation) {
  std::string tokens;
  for (std::int64_t const token : generation.tokens) tokens += (tokens.empty() ? "" : ", ") + std::to_string(token);
  return "\"tokens\": [" + tokens + "], \"finish_reason\": \"" + std::string(name_of(generation.finish_reason)) +
         "\", \"stats\": " + generation.stats.json();
}

// Generates for several prompts; the JSON is that of `tide-export generate --json`.
std::string generate_batch(tide::Engine const& engine, Options const& options) {
  auto const started = std::chrono::steady_clock::now();
  std::vector<tide::Generation> const generations = engine.generate(options.prompts, options.config);
  double const seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  std::size_t total = 0;
  std::string sequences;
  for (tide::Generation const& one : generations) {
    total += one.tokens.size();
    sequences += (sequences.empty() ? "{" : ", {") + as_json(one) + "}";
  }
  return "\"total_tokens\": " + std::to_string(total) + ", \"seconds\": " + std::to_string(seconds) +
         ", \"tokens_per_second\": " + std::to_string(static_cast<double>(total) / seconds) + ", \"sequences\": [" +
         sequences + "]";
}

}  // namespace

int main(int count, char** arguments) {
  try {
    Options const options = parse({arguments + 1, arguments + count});
    if (options.help) {
      std::cout << kUsage;
      return 0;
    }
    if (options.bundle.empty()) throw tide::ConfigError("no bundle is given: see tide_generate --help");
    tide::Engine const engine = tide::Engine::load(options.bundle, options.load);
    std::vector<std::int64_t> const prompt = options.prompts.empty() ? std::vector<std::int64_t>{} : options.prompts[0];
    std::string const answer = options.prompts.size() > 1 ? generate_batch(engine, options)
                                                          : as_json(engine.generate(prompt, options.config));
    std::cout << "{\"mode\": \"" << name_of(engine.resolved(options.config).mode) << "\", " << answer << "}"
              << std::endl;
    return 0;
  } catch (std::exception const& error) {  // tide::TideError, or std::bad_alloc
    std::cerr << "tide_generate: " << error.what() << std::endl;
    return 2;
  }
}

// Generates tokens from a bundle, without Python.
#include <chrono>
#include <iostream>

#include "options.h"
#include "results.h"

namespace {

// Generates for several prompts; the JSON is that of `tide-export generate --json`.
std::string generate_batch(tide::Engine const& engine, Options const& options) {
  auto const started = std::chrono::steady_clock::now();
  std::vector<tide::Generation> const generations = engine.generate(options.prompts, options.config);
  double const seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  std::size_t total = 0;
  std::string sequences;
  for (tide::Generation const& one : generations) {
    total += one.tokens.size();
    sequences += (sequences.empty() ? "{" : ", {") + fields(one) + "}";
  }
  return "\"total_tokens\": " + std::to_string(total) + ", \"seconds\": " + std::to_string(seconds) +
         ", \"tokens_per_second\": " + std::to_string(static_cast<double>(total) / seconds) + ", \"sequences\": [" +
         sequences + "]";
}

}  // namespace

int main(int count, char** arguments) {
  try {
    Options options = parse({arguments + 1, arguments + count});
    if (options.help) {
      std::cout << usage();
      return 0;
    }
    if (options.bundle.empty()) throw tide::ConfigError("no bundle is given: see tide_generate --help");
    tide::Engine const engine = tide::Engine::load(options.bundle, options.load);
    if (!options.texts.empty() || !options.config.stop.empty()) {
      tide::Tokenizer const tokenizer = engine.tokenizer();
      for (std::string const& text : options.texts) options.prompts.push_back(tokenizer.encode(text));
      options.config.detokenizer = tokenizer;
    }
    std::vector<std::int64_t> const prompt = options.prompts.empty() ? std::vector<std::int64_t>{} : options.prompts[0];
    std::string const answer = options.prompts.size() > 1 ? generate_batch(engine, options)
                                                          : fields(engine.generate(prompt, options.config));
    auto const sequences = static_cast<std::int64_t>(options.prompts.size());
    std::cout << "{\"mode\": \"" << name_of(engine.resolved(options.config, sequences).mode) << "\", " << answer << "}"
              << std::endl;
    return 0;
  } catch (std::exception const& error) {  // tide::TideError, or std::bad_alloc
    std::cerr << "tide_generate: " << error.what() << std::endl;
    return 2;
  }
}

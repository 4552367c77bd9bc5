// Streams the tokens after a prompt of token ids: tide_service BUNDLE ID...
#include <tide/runtime.h>

#include <cstdint>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

int main(int count, char** arguments) {
  try {
    std::vector<std::int64_t> prompt;
    for (int i = 2; i < count; ++i) prompt.push_back(std::stoll(arguments[i]));

    tide::Engine const engine = tide::Engine::load(count > 1 ? arguments[1] : "out/demo");
    tide::GenerationConfig config;
    config.max_new_tokens = 16;
    config.threshold = 0.7;

    auto const print = [](tide::Token const& token) {
      std::cout << token.id << " after " << token.exit_layer << " layers" << std::endl;
      return true;  // false ends the generation
    };
    tide::Generation const done = engine.stream(prompt, config, print);
    std::cerr << "exit rate " << done.stats.exit_rate() << std::endl;
    return 0;
  } catch (std::exception const& error) {  // tide::TideError, or std::bad_alloc
    std::cerr << "tide_service: " << error.what() << std::endl;
    return 2;
  }
}

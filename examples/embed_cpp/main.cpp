// Continues each line of its input, and writes the text as it is made: tide_service BUNDLE
#include <tide/runtime.h>
#include <tide/tokenizer.h>

#include <cstdint>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

int main(int count, char** arguments) {
  try {
    tide::Engine const engine = tide::Engine::load(count > 1 ? arguments[1] : "out/demo");
    tide::Tokenizer const tokenizer = engine.tokenizer();
    tide::GenerationConfig config;
    config.max_new_tokens = 64;

    std::string line;
    while (std::getline(std::cin, line)) {
      std::vector<std::int64_t> const prompt = tokenizer.encode(line);
      tide::TextStream text(tokenizer, prompt);
      tide::TokenStream stream = engine.open_stream(prompt, config);
      while (auto const token = stream.next()) std::cout << text.push(token->id) << std::flush;
      std::cout << text.finish() << std::endl;
      std::cerr << stream.so_far().tokens.size() << " tokens, exit rate " << stream.so_far().stats.exit_rate() << std::endl;
    }
    return 0;
  } catch (std::exception const& error) {  // tide::TideError, or std::bad_alloc
    std::cerr << "tide_service: " << error.what() << std::endl;
    return 2;
  }
}

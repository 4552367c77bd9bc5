// Runs the C++ runtime for the tests: reads one command per line, which tests/cpp/cpp_engine.py writes, and answers each
// with one line, "ok JSON" or "error CLASS SENTENCE".
#include <atomic>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <sstream>
#include <thread>

#include "allocations.h"
#include "batch.h"
#include "hooks.h"
#include "lists.h"
#include "load.h"
#include "networks.h"
#include "options.h"
#include "results.h"
#include "schedule.h"

namespace {

using Words = std::vector<std::string>;

std::vector<std::int64_t> prompt_of(Options const& options) {
  return options.prompts.empty() ? std::vector<std::int64_t>{} : options.prompts.at(0);
}

// Whether a callback wants more than `count` tokens. It throws if `max_tokens` is `-count`.
bool goes_on(std::size_t count, std::int64_t max_tokens) {
  auto const number = static_cast<std::int64_t>(count);
  if (number == -max_tokens) throw CallbackError(number);
  return max_tokens < 0 || number < max_tokens;
}

// The results of `make` in `count` threads, all of which begin at once.
template <typename F>
std::string at_once(std::size_t count, F const& make) {
  std::vector<std::string> results(count);
  std::vector<std::thread> threads;
  std::atomic<bool> go{false};
  for (std::size_t t = 0; t < count; ++t) {
    threads.emplace_back([&, t] {
      while (!go) std::this_thread::yield();
      try {
        results[t] = make(t);
      } catch (tide::TideError const&) {
        results[t] = "null";
      }
    });
  }
  go = true;
  for (std::thread& thread : threads) thread.join();
  return list(results.data(), results.size(), [](std::string const& text) { return text; });
}

class Driver {
 public:
  std::string answer(std::string const& command, Words words) {
    if (command == "load") return load(parse(words));
    if (command == "load_log_throws") return load_with_a_log_that_throws(parse(words));
    if (command == "manifest") return parsed_manifest(words.at(0));
    if (command == "networks") return load_networks(words.at(0), parse({words.begin() + 1, words.end()}));
    if (command == "gpu_memory") return limit_gpu_memory(whole_numbers(command, words.at(0)).at(0));
    if (command == "gpu_graphs") return gpu_graphs();
    if (command == "machine") return checked_machine(words.at(0), words.at(1), whole_numbers(command, words.at(2)));
    if (command == "profiles") {
      return picked_profiles(words.at(0), whole_numbers(command, words.at(1)), whole_numbers(command, words.at(2)).at(0));
    }
    if (command == "plugins") return found_plugins(words.at(0));
    if (command == "allocation_failed") return allocation_failed() ? "true" : "false";
    if (command == "generate") return generate(parse_with_hooks(words, engine(), tokenizer_));
    if (command == "tokenizer") return open_tokenizer(words);
    if (command == "encode") return list(tokenizer().encode(from_hex(words.at(0)), words.at(1) == "1"));
    if (command == "decode") return json_string(tokenizer().decode(ids_of(words.at(0)), words.at(1) == "1"));
    if (command == "pieces") return pieces(ids_of(words.at(0)), ids_of(words.at(1)));
    if (command == "generate_batch") return generate_batch(parse_with_hooks(words, engine(), tokenizer_));
    if (command.rfind("batch_", 0) == 0) return batch_.answer(command, words);
    if (command.rfind("schedule_", 0) == 0) return schedule_.answer(engine(), command, words);
    if (command == "thresholds") return thresholds(parse(words).config);
    if (command == "max_batch_size") return std::to_string(engine().max_batch_size());
    std::int64_t const number = whole_numbers(command, words.at(0)).at(0);
    if (command == "fail_allocation") return fail_next(number, whole_numbers(command, words.at(1)).at(0));
    if (command == "stream") return stream(number, parse_with_hooks({words.begin() + 1, words.end()}, engine()));
    if (command == "at_once") return prompts_at_once(number, parse({words.begin() + 1, words.end()}));
    if (command == "batches_at_once") return batches_at_once(number, parse({words.begin() + 1, words.end()}));
    if (command == "stream_batch") return stream_batch(number, words);
    if (command == "threads") return threads(number, words);
    if (command == "draw") return draw(number, parse_with_hooks({words.begin() + 1, words.end()}, engine()));
    if (command == "start") return start(number, words);
    tide::State& state = states_.at(number);
    if (command == "step") return step(state, words);
    if (command == "rewind") rewind(state, whole_numbers(command, words.at(1)).at(0));
    if (command == "set_thresholds") state.set_thresholds(real_numbers(command, words.at(1)));
    return described(state) + "}";
  }

 private:
  tide::Engine const& engine() const { return engine_.value(); }

  std::string load(Options options) {
    std::vector<std::string> log;
    options.load.log = [&](std::string const& sentence) { log.push_back("\"" + sentence + "\""); };
    engine_ = tide::Engine::load(options.bundle, options.load);
    return list(log.data(), log.size(), [](std::string const& text) { return text; });
  }

  // Whether an exception of the log reaches the caller.
  std::string load_with_a_log_that_throws(Options options) {
    options.load.log = [](std::string const&) { throw CallbackError(0); };
    try {
      engine_ = tide::Engine::load(options.bundle, options.load);
    } catch (CallbackError const&) {
      return "true";
    }
    return "false";
  }

  static std::string parsed_manifest(std::string const& path) {
    std::ifstream stream(path, std::ios::binary);
    tide::Manifest::from_json({std::istreambuf_iterator<char>(stream), {}}, "'" + path + "'");
    return "null";
  }

  std::string load_networks(std::string const& device, Options const& options) {
    states_.clear();
    engine_ = engine_on_networks(device, options);
    return "null";
  }

  static std::string fail_next(std::int64_t number, std::int64_t again) {
    fail_allocation(number, again);
    return "null";
  }

  std::string generate(Options const& options) const {
    std::vector<std::int64_t> const prompt = prompt_of(options);
    return as_json(injected([&] { return engine().generate(prompt, options.config); }));
  }

  std::string generate_batch(Options const& options) const {
    return as_json(injected([&] { return engine().generate(options.prompts, options.config); }));
  }

  std::string thresholds(tide::GenerationConfig const& config) const {
    std::vector<double> const values = resolve_thresholds(engine().manifest(), config);
    std::vector<float> const shown(values.begin(), values.end());
    return list(shown.data(), shown.size());
  }

  // The callback cancels after `max_tokens` tokens; if that is negative, it throws at the token of that number.
  std::string stream(std::int64_t max_tokens, Options const& options) const {
    std::vector<std::int64_t> taken;
    auto const on_token = [&](tide::Token const& token) {
      taken.push_back(token.id);
      return goes_on(taken.size(), max_tokens);
    };
    try {
      tide::Generation const generation = engine().stream(prompt_of(options), options.config, on_token);
      return "{\"taken\": " + list(taken) + ", \"generation\": " + as_json(generation) + "}";
    } catch (CallbackError const& error) {
      return "{\"taken\": " + list(taken) + ", \"thrown\": " + std::to_string(error.token) + "}";
    }
  }

  // NUMBER MAX_TOKENS OPTIONS: of several prompts, the callback cancels the one of this number after `max_tokens` tokens;
  // if that is negative, it throws at its token of that number.
  std::string stream_batch(std::int64_t number, Words const& words) const {
    std::int64_t const max_tokens = whole_numbers("stream_batch", words.at(1)).at(0);
    Options const options = parse_with_hooks({words.begin() + 2, words.end()}, engine());
    std::vector<std::vector<std::int64_t>> taken(options.prompts.size());
    auto const on_token = [&](std::size_t prompt, tide::Token const& token) {
      taken.at(prompt).push_back(token.id);
      return static_cast<std::int64_t>(prompt) != number || goes_on(taken.at(prompt).size(), max_tokens);
    };
    auto const tokens = [&] { return list(taken.data(), taken.size(), [](auto const& ids) { return list(ids); }); };
    try {
      std::vector<tide::Generation> const generations = engine().stream(options.prompts, options.config, on_token);
      return "{\"taken\": " + tokens() + ", \"generations\": " + as_json(generations) + "}";
    } catch (CallbackError const& error) {
      return "{\"taken\": " + tokens() + ", \"thrown\": " + std::to_string(error.token) + "}";
    }
  }

  // Generates in `count` threads at once, in thread t for the prompt without its last t tokens.
  std::string prompts_at_once(std::int64_t count, Options const& options) const {
    return at_once(static_cast<std::size_t>(count), [&](std::size_t t) {
      std::vector<std::int64_t> prompt = prompt_of(options);
      prompt.resize(prompt.size() - t);
      return as_json(engine().generate(prompt, options.config));
    });
  }

  // Generates in `count` threads at once, in thread t for the list of prompts without the last t.
  std::string batches_at_once(std::int64_t count, Options const& options) const {
    return at_once(static_cast<std::size_t>(count), [&](std::size_t t) {
      std::vector<std::vector<std::int64_t>> prompts = options.prompts;
      prompts.resize(prompts.size() - t);
      return as_json(engine().generate(prompts, options.config));
    });
  }

  // COUNT SECONDS SEED OPTIONS
  std::string threads(std::int64_t count, Words const& words) const {
    double const seconds = real_numbers("threads", words.at(1)).at(0);
    auto const seed = static_cast<unsigned>(whole_numbers("threads", words.at(2)).at(0));
    std::vector<std::vector<std::int64_t>> const prompts = parse({words.begin() + 3, words.end()}).prompts;
    return load_of_threads(engine(), prompts, static_cast<std::size_t>(count), seconds, seed);
  }

  // Counts, over the seeds 0 .. count - 1, the second token (the first if only one is generated).
  std::string draw(std::int64_t count, Options options) const {
    std::map<std::int64_t, std::int64_t> times;
    for (std::int64_t seed = 0; seed < count; ++seed) {
      options.config.seed = seed;
      std::vector<std::int64_t> const tokens = engine().generate(prompt_of(options), options.config).tokens;
      ++times[tokens[tokens.size() > 1 ? 1 : 0]];
    }
    std::string text;
    for (auto const& [token, often] : times) {
      text += (text.empty() ? "\"" : ", \"") + std::to_string(token) + "\": " + std::to_string(often);
    }
    return "{" + text + "}";
  }

  // [LIBRARY]
  std::string open_tokenizer(Words const& words) {
    tokenizer_ = words.empty() ? engine().tokenizer() : engine().tokenizer(words.at(0));
    return "null";
  }

  tide::Tokenizer const& tokenizer() const { return tokenizer_.value(); }

  static std::vector<std::int64_t> ids_of(std::string const& word) { return whole_numbers("ids", word); }

  // The pieces of text that tokens after a prompt give, and what is left at the end.
  std::string pieces(std::vector<std::int64_t> const& prompt, std::vector<std::int64_t> const& tokens) const {
    tide::TextStream stream(tokenizer(), prompt);
    std::vector<std::string> texts;
    for (std::int64_t const token : tokens) texts.push_back(stream.push(token));
    texts.push_back(stream.finish());
    return list(texts.data(), texts.size(), json_string);
  }

  // NUMBER THRESHOLDS MAX_PENDING ROOM
  std::string start(std::int64_t number, Words const& words) {
    std::int64_t const limit = whole_numbers("start", words.at(2)).at(0),
                       room = whole_numbers("start", words.at(3)).at(0);
    std::vector<double> const values =
        words.at(1) == "none" ? std::vector<double>{} : real_numbers("start", words.at(1));
    states_.insert_or_assign(number, engine().start(values, limit, room));  // may replace another engine's
    return described(states_.at(number)) + "}";
  }

  // NUMBER KEEP FULL IDS
  std::string step(tide::State& state, Words const& words) {
    std::int64_t const keep = whole_numbers("step", words.at(1)).at(0);
    std::vector<std::int64_t> const ids =
        words.size() > 3 ? whole_numbers("step", words.at(3)) : std::vector<std::int64_t>{};
    bool const full = words.at(2) == "1";
    tide::StepResult const result = injected([&] { return state.step(ids, keep, full); });
    return described(state) + ", \"exit_layer\": " + std::to_string(result.exit_layer) +
           ", \"segments_run\": " + std::to_string(result.segments_run) +
           ", \"scores\": " + list(result.scores, engine().manifest().checkpoints.size()) +
           ", \"vocabulary\": " + std::to_string(result.vocabulary) +
           ", \"rows\": " + list(result.logits, result.rows * result.vocabulary) + "}";
  }

  static void rewind(tide::State& state, std::int64_t length) {
    injected([&] { state.rewind(length); });
  }

  static std::string described(tide::State const& state) {
    return "{\"lengths\": " + list(state.lengths()) + ", \"computed\": " + list(state.computed()) +
           ", \"pending\": " + list(state.pending()) + ", \"capacity\": " + std::to_string(state.capacity());
  }

  std::optional<tide::Engine> engine_;
  std::optional<tide::Tokenizer> tokenizer_;
  std::map<std::int64_t, tide::State> states_;
  BatchDriver batch_;
  ScheduleDriver schedule_;
};

char const* name_of(std::exception const& error) {
  if (dynamic_cast<tide::ConfigError const*>(&error) != nullptr) return "ConfigError";
  if (dynamic_cast<tide::BundleError const*>(&error) != nullptr) return "BundleError";
  if (dynamic_cast<tide::QueueFullError const*>(&error) != nullptr) return "QueueFullError";
  if (dynamic_cast<tide::GenerationError const*>(&error) != nullptr) return "GenerationError";
  if (dynamic_cast<tide::ProviderError const*>(&error) != nullptr) return "ProviderError";
  return "std::exception";
}

}  // namespace

int main() {
  Driver driver;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream stream(line);
    std::string command;
    Words words;
    stream >> command;
    for (std::string word; stream >> word;) words.push_back(word);
    try {
      std::string const answer = driver.answer(command, words);
      std::cout << "ok " << answer << std::endl;
    } catch (std::exception const& error) {
      std::cout << "error " << name_of(error) << " " << error.what() << std::endl;
    }
  }
}

// Callbacks that throw, at every token: callbacks BUNDLE BUNDLE_WITH_ENGINES. The exception must reach the caller as it was
// thrown, and the engine must give the same tokens after it. Prints each difference, and at last how many were thrown.
#include <filesystem>
#include <iostream>
#include <stdexcept>

#include "tide/scheduler.h"

namespace {

using Ids = std::vector<std::int64_t>;
using Prompts = std::vector<Ids>;

struct Thrown {  // no std::exception
  std::size_t number;
};

int thrown = 0;

void check(bool right, std::string const& what) {
  if (!right) std::cout << what << "\n";
}

std::size_t entries(char const* folder) {
  auto const all = std::filesystem::directory_iterator(folder);
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

std::vector<tide::GenerationConfig> configs() {
  std::vector<tide::GenerationConfig> all(4);
  for (tide::GenerationConfig& one : all) {
    one.max_new_tokens = 9;
    one.stop_token_ids = Ids{};
    one.mode = tide::Mode::exit;
    one.threshold = 0.5;
  }
  all[0].mode = tide::Mode::full;
  all[0].threshold.reset();
  all[1].temperature = 0.8;
  all[1].seed = tide::Seed(3);
  all[2].mode = tide::Mode::lossless;
  all[2].max_pending = all[2].prompt_lookup = 3;
  return all;
}

// What a call threw: "" nothing, or another kind of exception's text.
template <typename F>
std::string thrown_by(F const& call, std::size_t expected) {
  try {
    call();
  } catch (Thrown const& one) {
    ++thrown;
    return one.number == expected ? "as thrown" : "another";
  } catch (std::exception const& error) {
    return error.what();
  }
  return "";
}

void streams(tide::Engine const& engine, tide::GenerationConfig const& config) {
  Ids const prompt = {3, 14, 15, 9}, expected = engine.generate(prompt, config).tokens;
  for (std::size_t k = 1; k <= expected.size(); ++k) {
    Ids taken;
    auto const on_token = [&](tide::Token const& token) {
      taken.push_back(token.id);
      if (taken.size() == k) throw Thrown{k};
      return true;
    };
    check(thrown_by([&] { engine.stream(prompt, config, on_token); }, k) == "as thrown", "a stream's exception");
    check(taken == Ids(expected.begin(), expected.begin() + static_cast<std::ptrdiff_t>(k)), "a stream's tokens");
  }
  check(engine.generate(prompt, config).tokens == expected, "tokens after a stream that an exception ended");
}

void lists(tide::Engine const& engine, tide::GenerationConfig const& config) {
  Prompts const prompts = {{3, 14, 15, 9}, {2, 6}, {5, 3, 5, 8, 9, 7, 9}};
  auto const tokens = [&] {
    Prompts all;
    for (tide::Generation const& one : engine.generate(prompts, config)) all.push_back(one.tokens);
    return all;
  };
  Prompts const expected = tokens();
  for (std::size_t number = 0; number < prompts.size(); ++number) {
    for (std::size_t k = 1; k <= expected[number].size(); ++k) {
      Prompts taken(prompts.size());
      auto const on_token = [&](std::size_t prompt, tide::Token const& token) {
        taken[prompt].push_back(token.id);
        if (prompt == number && taken[prompt].size() == k) throw Thrown{k};
        return true;
      };
      check(thrown_by([&] { engine.stream(prompts, config, on_token); }, k) == "as thrown", "a list's exception");
      for (std::size_t i = 0; i < prompts.size(); ++i) {
        check(std::equal(taken[i].begin(), taken[i].end(), expected[i].begin()), "tokens of a list");
      }
    }
  }
  check(tokens() == expected, "tokens after a list that an exception ended");
}

// Hooks that throw something, alone and in a scheduler with a request that has none.
void hooks(tide::Engine const& engine, tide::GenerationConfig config) {
  Ids const prompt = {3, 14, 15, 9}, expected = engine.generate(prompt, config).tokens;
  tide::GenerationConfig const plain = config;
  bool foreign = false;
  config.logits_processor = [&](Ids const& ids, float*, std::size_t) {
    if (ids.size() < 7) return;
    if (foreign) throw Thrown{7};
    throw std::runtime_error("no rule fits\nand more");
  };
  for (bool const is_foreign : {false, true}) {
    foreign = is_foreign;
    std::string const said = foreign ? "as thrown" : "logits_processor failed: no rule fits";
    check(thrown_by([&] { engine.generate(prompt, config); }, 7) == said, "what a hook threw");
    tide::Scheduler scheduler = engine.scheduler(tide::SchedulerLimits());
    scheduler.start();
    tide::RequestHandle failing = scheduler.submit(prompt, config), other = scheduler.submit(prompt, plain);
    check(thrown_by([&] { failing.result(); }, 7) == said, "what a hook threw in a scheduler");
    check(other.result().tokens == expected, "the tokens of another request");
  }
}

// A log that throws ends the load.
void log(std::string const& bundle) {
  tide::LoadOptions options;
  options.verify = false;
  options.threads = 1;
  options.log = [](std::string const& sentence) { throw Thrown{sentence.size()}; };
  try {
    tide::Engine::load(bundle, options);
    check(false, "a log that throws is ignored");
  } catch (Thrown const&) {
    ++thrown;
  }
}

}  // namespace

int main(int, char** arguments) {
  tide::LoadOptions options;
  options.threads = 1;
  options.provider = "cpu";
  tide::Engine const engine = tide::Engine::load(arguments[1], options);
  engine.generate(Prompts{{1}, {2}, {3}});
  std::size_t const files = entries("/proc/self/fd"), threads = entries("/proc/self/task");
  for (tide::GenerationConfig const& config : configs()) {
    streams(engine, config);
    lists(engine, config);
    hooks(engine, config);
  }
  log(arguments[2]);
  check(entries("/proc/self/fd") == files && entries("/proc/self/task") == threads, "files or threads are left");
  std::cout << thrown << " thrown\n";
}

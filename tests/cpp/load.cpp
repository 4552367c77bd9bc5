#include "load.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "lists.h"

namespace {

using Clock = std::chrono::steady_clock;
using Tokens = std::vector<std::vector<std::int64_t>>;  // by prompt

constexpr std::int64_t kNewTokens = 10;
constexpr char const* kEnds[] = {"whole", "cancelled", "thrown"};

std::vector<tide::GenerationConfig> configs() {
  std::vector<tide::GenerationConfig> all(4);
  all[0].mode = tide::Mode::full;
  all[2].mode = tide::Mode::lossless;
  for (std::size_t i = 1; i < all.size(); ++i) all[i].threshold = tide::Threshold(0.5);
  all[3].temperature = 0.8;
  all[3].seed = tide::Seed(7);
  for (tide::GenerationConfig& one : all) one.max_new_tokens = kNewTokens;
  return all;
}

double resident_mib() {
  double size = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> size >> resident;
  return resident * static_cast<double>(::sysconf(_SC_PAGESIZE)) / (1 << 20);
}

class Load {
 public:
  Load(tide::Engine const& engine, Tokens const& prompts) : engine_(engine), prompts_(prompts), configs_(configs()) {
    for (tide::GenerationConfig const& config : configs_) {
      std::vector<Tokens> alone;
      for (auto const& prompt : prompts_) alone.push_back({engine_.generate(prompt, config).tokens});
      alone_.push_back(alone);
      Tokens together;
      for (tide::Generation const& one : engine_.generate(prompts_, config)) together.push_back(one.tokens);
      lists_.push_back(together);
    }
  }

  std::string run(std::size_t threads, double seconds, unsigned seed) {
    auto const started = Clock::now();
    auto const elapsed = [&] { return std::chrono::duration<double>(Clock::now() - started).count(); };
    std::vector<std::thread> workers;
    for (std::size_t t = 0; t < threads; ++t) {
      workers.emplace_back([this, t, seed] {
        std::mt19937 random(seed + static_cast<unsigned>(t));
        for (std::size_t kind = t; !over_; kind = random()) serve(kind, random);
      });
    }
    std::vector<double> memory;
    while (elapsed() < seconds) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      memory.push_back(resident_mib());
    }
    over_ = true;
    for (std::thread& worker : workers) worker.join();
    std::size_t const part = memory.size() / 10 + 1;
    auto const warm = memory.begin() + static_cast<std::ptrdiff_t>(memory.size() / 3);
    std::string text = "{\"seconds\": " + std::to_string(elapsed()) + ", \"tokens\": " + std::to_string(tokens_);
    text += ", \"warm_mib\": " + std::to_string(*std::max_element(warm, std::min(warm + part, memory.end())));
    text += ", \"end_mib\": " + std::to_string(*std::max_element(memory.end() - part, memory.end()));
    text += ", \"violations\": " + list(violations_.data(), violations_.size(), [](auto const& one) { return one; });
    text += ", \"generations\": {";
    for (auto const& [kind, count] : counts_) {
      text += (text.back() == '{' ? "\"" : ", \"") + kind + "\": " + std::to_string(count);
    }
    return text + "}}";
  }

 private:
  // kind: a mode, an end, and all prompts or one, by its remainders.
  void serve(std::size_t kind, std::mt19937& random) {
    std::size_t const mode = kind % configs_.size(), end = kind / configs_.size() % std::size(kEnds);
    std::size_t const number = kind / (configs_.size() * std::size(kEnds)) % (prompts_.size() + 1);
    bool const is_list = number == 0;
    Tokens const& expected = is_list ? lists_[mode] : alone_[mode][number - 1];
    Tokens taken(expected.size());
    std::size_t const last = random() % expected.size(), stop = 1 + random() % expected[last].size();
    auto const on_token = [&](std::size_t prompt, tide::Token const& token) {
      taken[prompt].push_back(token.id);
      if (end == 0 || prompt != last || taken[prompt].size() < stop) return true;
      if (end == 2) throw CallbackError(static_cast<std::int64_t>(stop));
      return false;
    };
    bool thrown = false;
    try {
      if (is_list) engine_.stream(prompts_, configs_[mode], on_token);
      if (!is_list) {
        engine_.stream(prompts_[number - 1], configs_[mode],
                       [&](tide::Token const& token) { return on_token(0, token); });
      }
    } catch (CallbackError const& error) {
      thrown = error.token == static_cast<std::int64_t>(stop);
    } catch (std::exception const& error) {
      return note("\"" + std::string(error.what()) + "\"");
    }
    bool same = thrown == (end == 2);
    for (std::size_t i = 0; i < taken.size(); ++i) {
      bool const whole = end == 0 || (end == 1 && i != last);
      std::size_t const count = whole ? expected[i].size() : i == last ? stop : taken[i].size();
      same = same && taken[i].size() == count && std::equal(taken[i].begin(), taken[i].end(), expected[i].begin());
    }
    std::string const name = "mode " + std::to_string(mode) + (is_list ? " list " : " ") + kEnds[end];
    if (!same) note("\"" + name + "\"");
    std::lock_guard<std::mutex> const lock(mutex_);
    ++counts_[name];
    for (auto const& ids : taken) tokens_ += ids.size();
  }

  void note(std::string const& violation) {
    std::lock_guard<std::mutex> const lock(mutex_);
    violations_.push_back(violation);
  }

  tide::Engine const& engine_;
  Tokens const prompts_;
  std::vector<tide::GenerationConfig> const configs_;
  std::vector<std::vector<Tokens>> alone_;  // expected tokens by configuration and prompt
  std::vector<Tokens> lists_;               // by configuration
  std::atomic<bool> over_{false};
  std::mutex mutex_;
  std::map<std::string, std::size_t> counts_;
  std::vector<std::string> violations_;
  std::size_t tokens_ = 0;
};

}  // namespace

std::string load_of_threads(tide::Engine const& engine, std::vector<std::vector<std::int64_t>> const& prompts,
                            std::size_t threads, double seconds, unsigned seed) {
  return Load(engine, prompts).run(threads, seconds, seed);
}

// Simulates a scheduler: one seed replays a whole run, with its requests, cancellations, failures and the time.
//
//     simulate BUNDLES SEED [STEPS]
//
// BUNDLES holds bundles of the table (table.h). Prints a line of JSON that says what happened. Exit code 1: something is wrong,
// which stderr says, with the command that repeats it.
#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <map>
#include <string>

#include "requests.h"
#include "table.h"
#include "tide/scheduler.h"
#include "world.h"

namespace simulation {
namespace {

constexpr std::int64_t kSteps = 20000;         // of a seed
constexpr std::int64_t kStepsOfAToken = 12;    // at most, of a request that has a slot
char const* const kBundles[] = {"plain", "recurrent"};

std::map<std::string, std::int64_t> seen;  // what happened, and how often
std::string replay;                        // the command

void require(bool condition, std::string const& what) {
  if (!condition) throw std::logic_error(what);
}

tide::Engine load(std::string const& folder, std::int64_t memory) {
  machine_bytes = memory;
  tide::LoadOptions options;
  options.provider = "cpu";
  options.verify = false;
  options.onnxruntime = "libtable.so";  // which this program is linked to
  for (char const* const name : {"one", "two"}) options.adapters[name] = folder + "-" + name;
  return tide::Engine::load(folder, options);
}

// A scheduler on an engine of its own, from its start to its end.
class Episode {
 public:
  Episode(Random& random, std::string const& folder)
      : random_(random), engine_(load(folder, 30000 + random.below(40000))), alone_(load(folder, 1 << 22)) {
    machine_bytes = 1 << 22;  // the drafter's pool is made when it is first used
    recurrent_ = !engine_.manifest().model.states.empty();
    tide::SchedulerLimits limits;
    limits.slots = 1 + random_.below(6);
    limits.prompt_tokens = random_.of({4, 5, 17, 64, 512});
    if (random_.one_in(3)) limits.waiting = 1 + random_.below(4);
    if (random_.one_in(3)) limits.kv_tokens = 40 + random_.below(400);
    limits.compaction_threshold = random_.of({0.0, 0.5, 1.0});
    limits.prefix_cache_bytes = random_.of({0, 3, 8, 20, 60}) * 400 + (recurrent_ ? 2000 : 0);
    std::optional<tide::AuditConfig> audit;
    if (random_.one_in(4) && !recurrent_) audit = tide::AuditConfig{0.3, std::nullopt, [](std::string const&) {}};
    while (!scheduler_) {
      try {
        scheduler_ = engine_.scheduler(limits, audit);
      } catch (tide::GenerationError const&) {  // a cache that its memory does not hold
        require(limits.prefix_cache_bytes > 0 || limits.slots > 1, "a scheduler of one slot does not start");
        if (limits.prefix_cache_bytes == 0) --limits.slots;
        limits.prefix_cache_bytes = 0;
        ++seen["limits refused"];
      }
    }
  }

  void run(std::int64_t steps) {
    for (std::int64_t i = 0; i < steps; ++i) act();
    bool const drains = random_.one_in(2);
    table_control.fail_at = -1;
    scheduler_->close(drains);
    for (Live& live : live_) live.cancelled = live.cancelled || !drains;
    settle(true);
    require(live_.empty() && scheduler_->running() + scheduler_->waiting() == 0, "a closed scheduler has requests");
  }

 private:
  struct Live {
    Request request;
    tide::RequestHandle handle;
    std::int64_t patience;  // the step by which it must have ended
    double deadline;
    bool cancelled = false;
    std::string shown{};
  };

  void act() {
    if (live_.size() < 14 && random_.one_in(live_.size() < 3 ? 2 : 12)) submit();
    if (!live_.empty() && random_.one_in(60)) {
      Live& live = live_[static_cast<std::size_t>(random_.below(static_cast<std::int64_t>(live_.size())))];
      live.handle.cancel();
      live.cancelled = true;
    }
    if (random_.one_in(500)) table_control.clock += random_.of({0.1, 10.0, 1e5});
    table_control.run_seconds = random_.of({0.0, 1e-6, 1e-3, 0.5});
    if (random_.one_in(50)) table_control.fail_at = table_control.runs + 1 + random_.below(5);
    std::int64_t const failing = table_control.fail_at;
    if (random_.one_in(50)) allocations_left = random_.below(150);
    bool const armed = allocations_left >= 0;
    began_ = table_control.clock;
    scheduler_->step();
    bool const allocation = armed && allocations_left < 0, run = failing >= 0 && table_control.runs >= failing;
    allocations_left = -1;
    if (run) table_control.fail_at = -1;
    failures_ = allocation || (run && table_control.failed_draft) ? 100 : run ? 1 : 0;  // a step is repeated for each request
    seen["allocations that failed"] += allocation, seen["runs that failed"] += run;
    ++seen["steps"], ++steps_;
    seen["steps of several"] += scheduler_->running() > 1;
    settle(false);
  }

  void submit() {
    Request request = draw(random_, recurrent_);
    std::int64_t const reserved = std::min(static_cast<std::int64_t>(request.prompt.size()) + request.config.max_new_tokens, table::kContext);
    try {
      Live live{request, scheduler_->submit(request.prompt, request.config, request.timeout), steps_ + 20, 0};
      live.deadline = request.timeout ? table_control.clock + *request.timeout : std::numeric_limits<double>::infinity();
      live_.push_back(std::move(live));
      for (Live const& one : live_) {  // those before it come first, and each step reads some of a prompt or writes a token
        live_.back().patience += static_cast<std::int64_t>(one.request.prompt.size()) + kStepsOfAToken * one.request.config.max_new_tokens;
      }
      ++seen["requests"];
    } catch (tide::QueueFullError const&) {
      ++seen["queue full"];
    } catch (tide::GenerationError const& error) {
      require(reserved > scheduler_->kv_tokens(), std::string("a request is refused: ") + error.what());
      ++seen["too large"];
    }
  }

  // Judges the requests that have ended.
  void settle(bool closed) {
    for (std::size_t i = 0; i < live_.size();) {
      Live& live = live_[i];
      bool const ended = live.handle.error() || live.handle.finish_reason();
      require(ended || (!closed && steps_ <= live.patience), "a request starves");
      require(ended || (!live.cancelled && began_ < live.deadline), "a request goes on that was cancelled or timed out");
      std::string const text = live.request.config.detokenizer ? live.handle.text(0) : "";
      require(text.compare(0, live.shown.size(), live.shown) == 0, "a text that was shown has changed");
      live.shown = text;
      if (!ended) {
        ++i;
        continue;
      }
      judge(live);
      live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }

  void judge(Live& live) {
    tide::Generation const got = live.handle.so_far();
    bool whole = false;
    if (std::exception_ptr const error = live.handle.error()) {
      try {
        std::rethrow_exception(error);
      } catch (std::exception const& thrown) {
        bool const hook = live.request.hook_throws_at >= 0 && std::string(thrown.what()).find(kHookThrew) != std::string::npos;
        require(hook || failures_-- > 0, std::string("a request failed: ") + thrown.what());
        ++seen[hook ? "hook threw" : "failed"];
      }
    } else {
      std::string const reason(tide::name_of(*live.handle.finish_reason()));
      whole = reason != "cancelled" && reason != "timeout";
      require(reason != "cancelled" || live.cancelled, "a request was cancelled that nobody cancelled");
      require(reason != "timeout" || table_control.clock >= live.deadline, "a request timed out too early");
      ++seen[reason];
    }
    if (live.request.hook_throws_at >= 0) {
      try {
        compare(live.request, got, generate(live.request), whole);
      } catch (tide::GenerationError const& error) {
        require(std::string(error.what()).find(kHookThrew) != std::string::npos, error.what());
        bool const drafts = live.request.config.mode == tide::Mode::lossless;  // of which a hook sees other numbers alone
        require(!whole || drafts, "a hook threw alone, and not in company");
      }
      return;
    }
    tide::Generation const expected = generate(live.request);
    compare(live.request, got, expected, whole);
    check_rule(live.request, engine_.manifest(), expected);
    seen["tokens"] += static_cast<std::int64_t>(got.tokens.size());
    for (std::int64_t const token : got.tokens) seen["text"] = (seen["text"] * 31 + token) % 1000003;
    seen["exits"] += got.stats.total_exited();
    seen["drafts accepted"] += got.stats.accepted;
    seen["drafter's accepted"] += got.stats.learned_accepted;
    seen["cached tokens"] += live.handle.cached_tokens();
  }

  // What a request gets alone: as a stream, or as a list of one.
  tide::Generation generate(Request const& request) {
    bool const list = request.config.states || random_.one_in(3);
    std::vector<std::vector<std::int64_t>> const prompts(1, request.prompt);
    table::Control const outside = std::exchange(table_control, {});  // neither time nor failures are this request's
    try {
      tide::Generation alone = list ? alone_.generate(prompts, request.config)[0] : alone_.generate(request.prompt, request.config);
      table_control = outside;
      return alone;
    } catch (...) {
      table_control = outside;
      throw;
    }
  }

  Random& random_;
  tide::Engine engine_, alone_;
  bool recurrent_ = false;
  double began_ = 0;  // the last step
  std::int64_t failures_ = 0;  // requests that the last step may end by an error, at most
  std::optional<tide::Scheduler> scheduler_;
  std::vector<Live> live_;
  std::int64_t steps_ = 0;
};

void run(std::string const& bundles, std::int64_t seed, std::int64_t steps) {
  Random random(static_cast<std::uint64_t>(seed));
  table_control = {};
  while (steps > 0) {
    std::int64_t const count = std::min<std::int64_t>(steps, 200 + random.below(1500));
    Episode episode(random, bundles + "/" + kBundles[random.below(2)]);
    episode.run(count);
    steps -= count;
  }
}

void ended(int) {
  std::cerr << replay << std::endl;
  std::_Exit(1);
}

}  // namespace
}  // namespace simulation

int main(int count, char** arguments) {
  using namespace simulation;
  std::int64_t const seed = count > 2 ? std::atoll(arguments[2]) : 0, steps = count > 3 ? std::atoll(arguments[3]) : kSteps;
  ::unsetenv("TIDE_DRAFT_COSTS");  // what steps cost is measured in virtual time, and kept nowhere
  for (char const* const name : {"HOME", "XDG_CACHE_HOME"}) ::unsetenv(name);
  replay = std::string(arguments[0]) + " " + arguments[1] + " " + std::to_string(seed) + " " + std::to_string(steps);
  for (int const signal : {SIGABRT, SIGSEGV, SIGFPE, SIGBUS}) std::signal(signal, ended);
  try {
    run(arguments[1], seed, steps);
  } catch (std::exception const& error) {
    std::cerr << "at step " << seen["steps"] << ": " << error.what() << "\n";
    ended(0);
  }
  for (auto const& [what, number] : seen) std::cout << (what == seen.begin()->first ? "{" : ", ") << '"' << what << "\": " << number;
  std::cout << "}" << std::endl;
}

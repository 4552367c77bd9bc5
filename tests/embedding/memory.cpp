// Lets every allocation of an operation fail in turn: memory BUNDLE PROVIDER OPERATION. The operation must then either have
// ended with an error, with all as before, so that it succeeds when it is tried again, or be unaffected. Prints each
// difference, and at last how many allocations failed and how often that was an error.
#include <cstring>
#include <iostream>
#include <map>

#include "allocations.h"
#include "tide/batch.h"
#include "tide/scheduler.h"

namespace {

using Ids = std::vector<std::int64_t>;

std::vector<double> const kMixed = {0.5, 0.5};
std::int64_t const kPending = 16;

// --- what is compared ------------------------------------------------------------------------------------------------

template <typename T>
std::string bytes(T const* values, std::size_t count) {
  return {reinterpret_cast<char const*>(values), count * sizeof(T)};
}

std::string shown(Ids const& ids) {
  std::string text;
  for (std::int64_t const id : ids) text += std::to_string(id) + " ";
  return text;
}

// Of a step whose allocations no longer fail.
std::string shown(tide::StepResult const& result, std::size_t scores) {
  end_failures();
  return bytes(result.logits, result.rows * result.vocabulary) + shown({result.exit_layer, result.segments_run}) +
         (result.scores == nullptr ? "" : bytes(result.scores, scores));
}

std::string shown(tide::Generation const& made) {
  end_failures();
  tide::ExitStats const& stats = made.stats;
  std::string text = shown(made.tokens) + shown(stats.exit_layer) + shown(stats.layers_run) + made.text.value_or("");
  for (auto const& one : made.logprobs) text += std::to_string(one.logprob) + bytes(one.top.data(), one.top.size());
  return text + shown({stats.drafted, stats.accepted, stats.lookup_drafted, stats.lookup_accepted,
                       stats.layer_tokens_run, stats.layer_tokens_total});
}

// --- operations ------------------------------------------------------------------------------------------------------

class Failures {
 public:
  // prepare: makes a subject. call: the operation. facts: what it must not change when it fails. after: what follows.
  // every: lets only every so many allocations fail.
  template <typename Prepare, typename Call, typename Facts, typename After>
  void operator()(Prepare const& prepare, Call const& call, Facts const& facts, After const& after, int every = 1) {
    std::string expected, before;
    {
      auto undisturbed = prepare();
      before = facts(undisturbed);
      expected = call(undisturbed);
      expected += after(undisturbed);
    }
    for (std::int64_t number = 1;; number += every) {
      auto subject = prepare();
      std::string result, error;
      fail_allocation(number);
      try {
        result = call(subject);
      } catch (std::exception const& thrown) {
        end_failures();
        error = thrown.what();
      }
      if (!end_failures()) return;
      ++failures_;
      if (!error.empty()) {
        ++errors_;
        note(facts(subject) == before, number, "has changed something, and said: " + error);
      }
      try {
        if (!error.empty()) result = call(subject);
        note(result + after(subject) == expected, number, "gives other results (" + error + ")");
      } catch (std::exception const& thrown) {
        note(false, number, "cannot be repeated: " + std::string(thrown.what()));
      }
    }
  }

  void note(bool right, std::int64_t number, std::string const& what) {
    if (!right) std::cout << "allocation " << number << " " << what << "\n";
  }
  void count(bool error) {
    ++failures_;
    errors_ += error ? 1 : 0;
  }
  ~Failures() { std::cout << failures_ << " failures, " << errors_ << " errors\n"; }

 private:
  int failures_ = 0, errors_ = 0;
};

std::string nothing() { return ""; }

// --- one sequence ----------------------------------------------------------------------------------------------------

void sequences(tide::Engine const& engine, std::string const& operation, Failures& failures) {
  std::size_t const checkpoints = kMixed.size();
  auto const prepare = [&] {  // with pending tokens
    tide::State state = engine.start(kMixed, kPending);
    for (Ids const& ids : {Ids{3, 14, 15}, Ids{9}, Ids{2}, Ids{6}}) state.step(ids);
    return state;
  };
  auto const facts = [](tide::State const& state) { return shown(state.lengths()); };
  auto const after = [&](tide::State& state) {  // steps of one token, of several, and to the next page
    std::string text = facts(state);
    for (Ids const& ids : {Ids{9}, Ids{7}, Ids{9, 3}, Ids{1}, Ids{2, 3, 5, 7, 11}, Ids{1}}) {
      text += shown(state.step(ids, 2), checkpoints);
    }
    return text;
  };
  Ids const ids = operation == "grow" ? Ids{5, 3, 5, 8} : Ids{5};
  if (operation == "rewind") {
    return failures(prepare, [](tide::State& state) { state.rewind(4); return nothing(); }, facts, after);
  }
  failures(prepare, [&](tide::State& state) { return shown(state.step(ids, 3), checkpoints); }, facts, after);
}

// --- a batch ---------------------------------------------------------------------------------------------------------

std::string stepped(tide::BatchState& batch, std::map<std::size_t, Ids> const& parts, std::int64_t keep = 1) {
  std::vector<tide::SlotStep> steps;
  for (auto const& [slot, ids] : parts) steps.push_back({slot, ids, keep, false});
  std::vector<tide::StepResult> const results = batch.step(steps);
  std::string text;
  for (tide::StepResult const& result : results) text += shown(result, 0);
  return text;
}

void batches(tide::Engine const& engine, std::string const& operation, Failures& failures) {
  struct Subject {
    tide::BatchState batch;
    std::vector<std::size_t> slots;
  };
  auto const prepare = [&] {  // three sequences with pending tokens
    Subject made{engine.start_batch(1.0, 3), {}};
    for (int i = operation == "join" ? 1 : 0; i < 3; ++i) made.slots.push_back(made.batch.join(kMixed, kPending));
    for (std::int64_t const id : {3, 9, 2}) {
      std::map<std::size_t, Ids> parts;
      for (std::size_t const slot : made.slots) parts[slot] = {id, id + static_cast<std::int64_t>(slot)};
      stepped(made.batch, parts);
    }
    if (operation == "alone") made.batch.leave(made.slots[0]);
    return made;
  };
  auto const facts = [](Subject const& subject) {
    std::string text = std::to_string(subject.batch.free_slots()) + ": ";
    for (std::size_t const slot : subject.slots) {
      try {
        text += shown(subject.batch.lengths(slot));
      } catch (tide::GenerationError const&) {  // it left
      }
    }
    return text;
  };
  auto const after = [&](Subject& subject) {  // without those of the operation, of a new sequence, and of all
    std::string text = facts(subject) + stepped(subject.batch, {{subject.slots[2], {5}}});
    if (operation != "alone") subject.batch.leave(subject.slots[0]);
    std::size_t const slot = subject.batch.join(kMixed, kPending);
    text += stepped(subject.batch, {{slot, {1, 2, 3}}});
    return text + stepped(subject.batch, {{subject.slots[1], {4}}, {subject.slots[2], {4}}, {slot, {9}}});
  };
  failures(prepare, [&](Subject& subject) {
    auto& [batch, slots] = subject;
    if (operation == "alone") return stepped(batch, {{slots[1], {8}}});
    if (operation == "join") {
      slots.reserve(3);
      slots.push_back(batch.join(kMixed, kPending));
      return nothing();
    }
    Ids const many(engine.provider() == "cpu" ? 9 : 3, 7);
    return stepped(batch, {{slots[0], many}, {slots[1], Ids(many.begin() + 1, many.end())}}, 3);
  }, facts, after);
}

// --- generations -----------------------------------------------------------------------------------------------------

// A toy tokenizer: every token is a letter or two.
std::string letters(Ids const& ids) {
  std::string text;
  for (std::int64_t const id : ids) text.append(static_cast<std::size_t>(1 + id % 2), static_cast<char>('a' + id % 26));
  return text;
}

// of: "full", "exit", "lossless", or "all" that a generation may have besides.
tide::GenerationConfig config_of(std::string const& of) {
  tide::GenerationConfig config;
  config.max_new_tokens = 9;
  config.stop_token_ids = Ids{};
  config.mode = of == "full" ? tide::Mode::full : of == "exit" ? tide::Mode::exit : tide::Mode::lossless;
  if (of != "full") config.threshold = 0.5;
  if (of != "all" && of != "lossless") return config;
  config.max_pending = 3;
  config.prompt_lookup = 3;
  if (of == "lossless") return config;
  config.temperature = 0.8;
  config.seed = tide::Seed(3);
  config.repetition_penalty = 1.2;
  config.frequency_penalty = 0.1;
  config.logit_bias = {{4, 0.5}};
  config.logprobs = 2;
  config.detokenizer = letters;
  config.stop = {"no such text"};
  return config;
}

Ids const kPrompt = {3, 14, 15, 3, 14, 15, 3};

// Every step of a stream, whose number is the last part of the operation's name.
void streams(tide::Engine const& engine, std::string const& of, int steps, Failures& failures) {
  auto const prepare = [&] {
    tide::TokenStream stream = engine.open_stream(kPrompt, config_of(of));
    for (int i = 0; i < steps; ++i) stream.step();
    return stream;
  };
  failures(prepare, [](tide::TokenStream& stream) { return std::to_string(stream.step()); },
           [](tide::TokenStream const& stream) { return shown(stream.so_far()); },
           [](tide::TokenStream& stream) {
             std::string text = shown(stream.so_far());
             while (stream.step()) {
             }
             return text + shown(stream.so_far());
           });
}

// --- schedulers ------------------------------------------------------------------------------------------------------

struct Scheduled {
  tide::Scheduler scheduler;
  std::vector<tide::RequestHandle> handles;
};

Scheduled begun(tide::Engine const& engine, std::int64_t prefix_cache_bytes) {
  tide::SchedulerLimits limits;
  limits.slots = 4;
  limits.prompt_tokens = 6;
  limits.prefix_cache_bytes = prefix_cache_bytes;
  Scheduled made{engine.scheduler(limits), {}};
  auto const submit = [&](Ids const& prompt, std::string const& of) {
    made.handles.push_back(made.scheduler.submit(prompt, config_of(of)));
  };
  submit(kPrompt, "exit");
  submit(Ids(20, 9), "full");
  submit(kPrompt, "lossless");
  for (int i = 0; i < 2; ++i) made.scheduler.step();
  submit(Ids(40, 9), "full");  // joins in the next step
  return made;
}

std::vector<Ids> results(Scheduled& scheduled, int& failed) {
  std::vector<Ids> tokens;
  while (scheduled.scheduler.step()) {
  }
  for (tide::RequestHandle& handle : scheduled.handles) {
    tokens.push_back(handle.so_far().tokens);
    failed += handle.error() == nullptr ? 0 : 1;
  }
  return tokens;
}

// A step that fails is repeated for each request alone. A second failure, `again` allocations later, ends one of them.
void schedule(tide::Engine const& engine, std::int64_t again, std::int64_t prefix_cache_bytes, Failures& failures) {
  int none = 0;
  Scheduled undisturbed = begun(engine, prefix_cache_bytes);
  std::vector<Ids> const expected = results(undisturbed, none);
  for (std::int64_t number = 1;; ++number) {
    Scheduled scheduled = begun(engine, prefix_cache_bytes);
    fail_allocation(number, again);
    scheduled.scheduler.step();
    if (!end_failures()) return;
    int failed = 0;
    std::vector<Ids> const made = results(scheduled, failed);
    failures.count(failed > 0);
    failures.note(failed <= (again > 0 ? 2 : 1), number, "ends " + std::to_string(failed) + " requests");
    for (std::size_t i = 0; i < made.size(); ++i) {
      Ids const& right = expected[i];
      bool const ended = scheduled.handles[i].error() != nullptr;
      bool const begins = made[i].size() <= right.size() && std::equal(made[i].begin(), made[i].end(), right.begin());
      failures.note(ended ? begins : made[i] == right, number, "changes the tokens of request " + std::to_string(i));
    }
    failures.note(scheduled.scheduler.running() == 0, number, "leaves a slot taken");
    scheduled.handles.clear();
    scheduled.handles.push_back(scheduled.scheduler.submit(Ids(40, 9), config_of("full")));
    failures.note(results(scheduled, none)[0] == expected[3], number, "changes a later request");
  }
}

void submit(tide::Engine const& engine, Failures& failures) {
  failures([&] { return engine.scheduler(tide::SchedulerLimits()); },
           [](tide::Scheduler& scheduler) {
             scheduler.submit(kPrompt, config_of("all"), 600.0);
             return nothing();
           },
           [](tide::Scheduler const& scheduler) { return std::to_string(scheduler.waiting() + scheduler.running()); },
           [](tide::Scheduler& scheduler) {
             tide::RequestHandle handle = scheduler.submit(kPrompt, config_of("exit"));
             std::string const text = std::to_string(scheduler.waiting());
             return text + shown(handle.result());
           });
}

// --- engines ---------------------------------------------------------------------------------------------------------

std::string lists_of(tide::Engine const& engine) {
  std::string text;
  for (auto const& one : engine.generate(std::vector<Ids>{{3, 14, 15}, {9, 2}}, config_of("exit"))) text += shown(one);
  return text;
}

}  // namespace

int main(int, char** arguments) {
  std::string const bundle = arguments[1], operation = arguments[3];
  tide::LoadOptions options;
  options.threads = 1;
  options.provider = arguments[2];
  Failures failures;
  auto const load = [&] { return tide::Engine::load(bundle, options); };
  if (operation == "load") {
    failures([] { return std::vector<tide::Engine>(); },
             [&](auto& engines) {
               engines.push_back(load());
               return nothing();
             },
             [](auto const& engines) { return std::to_string(engines.size()); },
             [](auto const& engines) { return shown(engines.at(0).generate(kPrompt, config_of("full"))); }, 301);
    return 0;
  }
  if (operation == "list") {  // the first opens the networks for batches, which later ones share
    failures(load, lists_of, [](tide::Engine const&) { return nothing(); }, lists_of, 101);
    return 0;
  }
  tide::Engine const engine = load();
  std::size_t const dash = operation.find('-');
  std::string const kind = operation.substr(0, dash), rest = dash == std::string::npos ? "" : operation.substr(dash + 1);
  if (kind == "sequence") sequences(engine, rest, failures);
  if (kind == "batch") batches(engine, rest, failures);
  if (kind == "stream") {
    for (int steps = 0; steps < 8; ++steps) streams(engine, rest, steps, failures);
  }
  if (kind == "schedule") {
    schedule(engine, rest == "cache" ? 0 : std::stoi(rest), rest == "cache" ? 1 << 20 : 0, failures);
  }
  if (kind == "submit") submit(engine, failures);
  return 0;
}

#include "schedule.h"

#include <thread>

#include "allocations.h"
#include "hooks.h"
#include "lists.h"
#include "options.h"

namespace {

using Words = std::vector<std::string>;

std::optional<std::int64_t> limit_of(std::string const& word) {
  if (word == "none") return std::nullopt;
  return whole_numbers("schedule_open", word).at(0);
}

std::string shown(std::optional<tide::FinishReason> const& reason) {
  return reason ? "\"" + std::string(name_of(*reason)) + "\"" : "null";
}

}  // namespace

std::string ScheduleDriver::answer(tide::Engine const& engine, std::string const& command, Words const& words) {
  if (command == "schedule_open") {
    tide::SchedulerLimits limits;
    limits.slots = limit_of(words.at(0)).value();
    limits.prompt_tokens = limit_of(words.at(1)).value();
    limits.waiting = limit_of(words.at(2));
    limits.kv_tokens = limit_of(words.at(3));
    limits.prefix_cache_bytes = limit_of(words.at(4)).value();
    handles_.clear();
    scheduler_.reset();
    scheduler_.emplace(engine.scheduler(limits));
  } else if (command == "schedule_submit") {
    std::optional<double> timeout;
    if (words.at(0) != "none") timeout = real_numbers(command, words.at(0)).at(0);
    Options const options = parse_with_hooks({words.begin() + 1, words.end()}, engine);
    std::vector<std::int64_t> const prompt = options.prompts.empty() ? std::vector<std::int64_t>{} : options.prompts[0];
    handles_.push_back(injected([&] { return scheduler_->submit(prompt, options.config, timeout); }));
    return std::to_string(handles_.size() - 1);
  } else if (command == "schedule_step") {
    return injected([&] { return scheduler_->step(); }) ? "true" : "false";
  } else if (command == "schedule_readers") {
    return readers(words);
  } else if (command == "schedule_start") {
    scheduler_->start();
  } else if (command == "schedule_close") {
    scheduler_->close(words.at(0) == "1");
  } else if (command == "schedule_drop") {
    scheduler_.reset();
    return "null";
  } else if (command != "schedule_counts") {
    tide::RequestHandle& handle = handles_.at(static_cast<std::size_t>(whole_numbers(command, words.at(0)).at(0)));
    if (command == "schedule_cancel") handle.cancel();
    if (command == "schedule_result") return as_json(injected([&] { return handle.result(); }));
    if (command == "schedule_next") {
      std::optional<tide::Token> const token = injected([&] { return handle.next(); });
      return token ? std::to_string(token->id) : "null";
    }
    return "{\"tokens\": " + list(handle.tokens()) + ", \"finish_reason\": " + shown(handle.finish_reason()) +
           ", \"cached_tokens\": " + std::to_string(handle.cached_tokens()) +
           ", \"failed\": " + (handle.error() ? "true" : "false") + ", \"stats\": " + handle.stats().json() + "}";
  }
  return counts();
}

std::string ScheduleDriver::counts() const {
  return "{\"waiting\": " + std::to_string(scheduler_->waiting()) +
         ", \"running\": " + std::to_string(scheduler_->running()) +
         ", \"prefix_cache_bytes\": " + std::to_string(scheduler_->prefix_cache_bytes()) +
         ", \"closed\": " + (scheduler_->closed() ? "true" : "false") + "}";
}

// The tokens of each prompt, each read by a thread of its own; every third is cancelled after its second token.
std::string ScheduleDriver::readers(Words const& words) {
  Options const options = parse(words);
  std::vector<std::vector<std::int64_t>> tokens(options.prompts.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    threads.emplace_back([&, i] {
      tide::RequestHandle handle = scheduler_->submit(options.prompts[i], options.config);
      while (std::optional<tide::Token> const token = handle.next()) {
        tokens[i].push_back(token->id);
        if (i % 3 == 2 && tokens[i].size() == 2) handle.cancel();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return list(tokens.data(), tokens.size(), [](auto const& ids) { return list(ids); });
}

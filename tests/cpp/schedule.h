// Commands on one scheduler. All answers are JSON.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tide/scheduler.h"

class ScheduleDriver {
 public:
  // schedule_open SLOTS PROMPT_TOKENS WAITING KV_TOKENS PREFIX_CACHE_BYTES; schedule_submit TIMEOUT OPTIONS, which answers
  // the request's number; schedule_step; schedule_start; schedule_close DRAIN; schedule_drop, which destroys the
  // scheduler; and of the request of a number: schedule_cancel, schedule_next, schedule_result, schedule_describe. "none"
  // is no limit. schedule_readers OPTIONS submits each prompt in a thread of its own, which reads it.
  std::string answer(tide::Engine const& engine, std::string const& command, std::vector<std::string> const& words);

 private:
  std::string counts() const;
  std::string readers(std::vector<std::string> const& words);

  std::optional<tide::Scheduler> scheduler_;
  std::vector<tide::RequestHandle> handles_;
};

// Decodes requests that join, leave and are cancelled between steps.
//
// A step ends what was cancelled, lets waiting requests join as slots and K/V memory become free, and runs one token, or
// what lossless mode drafts, of each request that writes, and a part of the prompts of those that read. No thread is
// needed: whoever reads a handle does the steps. `Scheduler::start` gives them to a thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tide/runtime.h"

namespace tide {

class Audit;     // internal
class Job;       // internal
class StepLoop;  // internal

// What a scheduler holds at most.
struct SchedulerLimits {
  std::int64_t slots = 8;  // requests decoded at the same time; no more than `Engine::max_batch_size`
  // Tokens of prompts read in one step, 4 or more: how long those that write may wait for those that read.
  std::int64_t prompt_tokens = 512;
  std::optional<std::int64_t> waiting;  // requests in the queue beyond those for which a slot is free; none: any number
  // Tokens of K/V of all requests with a slot, each counted with its prompt and max_new_tokens; none: any number.
  std::optional<std::int64_t> kv_tokens;
  std::optional<double> compaction_threshold;  // of the batch, see `Engine::start_batch`; none: the bundle's
  // Of K/V of prompts and answers, of which requests with a slot may use some, that are kept for requests that begin with
  // the same tokens; 0: none.
  std::int64_t prefix_cache_bytes = 0;
};

// How a scheduler audits mode exit.
struct AuditConfig {
  double rate = 0.01;  // share of the tokens that are chosen, above 0 and at most 1; costs 2 % of the time at most
  // Largest share of tokens that exits may change. When the lower bound is above it, the thresholds of requests that get a
  // slot from then on are raised, half of the way to 1 each time; after three times exits are turned off. None: they stay.
  std::optional<double> epsilon;
  std::function<void(std::string const&)> log;  // receives a sentence when thresholds are raised; none: stderr
};

// What an audit found so far.
struct AuditState {
  std::int64_t audited = 0;    // tokens that were chosen, of all requests
  std::int64_t checked = 0;    // those of them that had exited, and were made again at full depth
  std::int64_t different = 0;  // those of them that full depth makes another token of
  std::int64_t raises = 0;     // how often thresholds were raised
  double upper_bound = 1;      // the share of tokens that exits change is no larger, since thresholds were raised last,
  double lower_bound = 0;      // and no smaller
};

// A submitted request. Each copy reads all tokens; one thread at a time may use a copy. May outlive its scheduler.
class RequestHandle {
 public:
  // The next token; none: the request has ended. Throws what the request failed with, after its last token.
  // GenerationError: a callback of a request of the same scheduler would wait for itself.
  std::optional<Token> next();

  // Waits for the end. Throws what the request failed with.
  Generation result();

  // Writes at most `room` tokens, from the one of number `from` on, without waiting, and returns how many.
  std::size_t read(std::size_t from, std::int64_t* ids, std::size_t room) const;

  // Waits, without a step, until there are more tokens than `from` or the request has ended, or so many seconds have passed.
  void wait(std::size_t from, double seconds) const;

  // Ends the request before the next step; its tokens so far stay. Does nothing after its end.
  void cancel();

  Generation so_far() const;                           // its finish_reason is valid once it has ended
  Mode mode() const;                                   // that it is decoded in
  bool finished(std::size_t tokens) const;             // whether it has ended with so many
  std::optional<FinishReason> finish_reason() const;   // none until it has ended, and where it failed
  std::exception_ptr error() const;                    // why it failed; null while it has not
  std::int64_t cached_tokens() const;                  // of the prompt, whose K/V came from the prefix cache

 private:
  friend class Scheduler;
  RequestHandle(std::shared_ptr<Job> job, std::weak_ptr<StepLoop> loop);
  Job& job() const;  // throws GenerationError: in a child of the process that submitted it

  std::shared_ptr<Job> job_;
  std::weak_ptr<StepLoop> loop_;
  std::size_t read_ = 0;  // tokens returned by `next`
};

// Created by `Engine::scheduler`. Any thread may submit, cancel and read; one at a time does the steps.
class Scheduler {
 public:
  Scheduler(Scheduler&&) noexcept;
  Scheduler& operator=(Scheduler&&) noexcept;
  ~Scheduler();  // cancels the requests that have not ended

  // Checks a request and puts it into the queue.
  //
  // config: as in `Engine::stream`.
  // timeout: seconds from now after which it is cancelled.
  //
  // Throws QueueFullError: the queue is full. GenerationError: as `Engine::stream`; the request can never get its K/V
  // memory; the scheduler is closed.
  RequestHandle submit(std::vector<std::int64_t> const& prompt, GenerationConfig const& config = {},
                       std::optional<double> timeout = std::nullopt);

  // Does one step over all requests with a slot; false: there was nothing to do. What fails ends its request.
  bool step() noexcept;

  // Lets a thread do the steps until `close`. Throws GenerationError: there is no thread.
  void start();

  // Takes no more requests, and returns when those submitted have ended; without `drain` these are cancelled.
  void close(bool drain = true);

  std::size_t waiting() const;  // requests without a slot
  std::size_t running() const;  // requests with a slot
  bool closed() const;          // whether it takes no more requests
  bool in_step() const;         // whether this thread does a step of it now: a callback asks
  std::int64_t prefix_cache_bytes() const;  // of K/V in the prefix cache now

  std::optional<AuditState> audit() const;  // none: there is no audit

  // Writes a byte to a file descriptor, which must not block, whenever requests got tokens or ended.
  void watch(int descriptor);
  void unwatch(int descriptor);

 private:
  friend class Engine;
  Scheduler(Engine engine, std::int64_t slots, std::shared_ptr<StepLoop> loop, std::shared_ptr<Audit> audit);

  Engine engine_;
  std::int64_t slots_;
  std::shared_ptr<StepLoop> loop_;
  std::shared_ptr<Audit> audit_;  // null: none
};

}  // namespace tide

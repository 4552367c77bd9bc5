// Schedules requests that join, leave and are cancelled between steps.
//
// A step ends cancelled requests, admits waiting ones to free slots and K/V memory, and runs one token (in lossless mode
// the drafts) of each decoding request and a chunk of the prompts of the others. The steps run in the thread that reads a
// handle or, after `Scheduler::start`, in a thread of the scheduler.
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

// Limits the work and memory of a scheduler.
struct SchedulerLimits {
  std::int64_t slots = 8;  // requests decoded at the same time, 1024 or fewer; at most `Engine::max_batch_size` are
  // Prompt tokens of one step, 1 or more; fewer make decoding requests wait less for prompts.
  std::int64_t prompt_tokens = 512;
  std::optional<std::int64_t> waiting;  // requests in the queue beyond those for which a slot is free; none: no limit
  // Tokens of K/V of all requests with a slot, each counted with its prompt and max_new_tokens; none: no limit.
  std::optional<std::int64_t> kv_tokens;
  std::optional<double> compaction_threshold;  // as in `Engine::start_batch`; none: the bundle's
  // Bytes of K/V and recurrent states of earlier prompts and answers kept for requests that begin with the same tokens, those
  // in use included; 0: none.
  std::int64_t prefix_cache_bytes = 0;
  // Bytes of earlier answers in lossless mode that later requests of the same adapter and `cache_salt` draft from; 0: none.
  std::int64_t answer_bytes = 0;
};

// Sets how a scheduler checks tokens of mode exit against full depth.
struct AuditConfig {
  double rate = 0.01;  // share of the tokens that are chosen, above 0 and at most 1; costs at most 2 % of the time
  // Largest share of tokens that exits may change. When the lower bound is above it, the thresholds of requests that get a
  // slot later are raised, halfway to 1 each time; after three times exits are turned off. None: thresholds stay.
  std::optional<double> epsilon;
  std::function<void(std::string const&)> log;  // receives a sentence when thresholds are raised; none: stderr
};

// The results of an audit so far.
struct AuditState {
  std::int64_t audited = 0;    // chosen tokens, over all requests
  std::int64_t checked = 0;    // chosen tokens that had exited and were computed again at full depth
  std::int64_t different = 0;  // checked tokens for which full depth chooses another token
  std::int64_t raises = 0;     // number of times that thresholds were raised
  double upper_bound = 1;      // of the share of tokens that exits change, since thresholds were last raised
  double lower_bound = 0;
};

// A submitted request. Each copy reads all tokens; one thread at a time may use a copy. May outlive its scheduler.
class RequestHandle {
 public:
  // Waits for the next token; none: the request has ended. Throws the error of a request that failed, after its last
  // token, or GenerationError: a callback of the same scheduler called it and would wait for itself.
  std::optional<Token> next();

  // Waits for the end. Throws the error of a request that failed.
  Generation result();

  // Writes up to `room` tokens, beginning with number `from`, without waiting, and returns their number.
  std::size_t read(std::size_t from, std::int64_t* ids, std::size_t room) const;

  // Waits, without a step, until there are more tokens than `from`, the request has ended, or `seconds` have passed.
  void wait(std::size_t from, double seconds) const;

  // Ends the request before the next step, unless it has ended; its tokens so far stay.
  void cancel();

  std::optional<Token> token(std::size_t number) const;  // that of this number; none: there is none yet, or no more
  std::string text(std::size_t from) const;  // from this byte on, without a possible start of a stop string
  Generation so_far() const;                           // its finish_reason is valid once the request has ended
  Mode mode() const;                                   // mode of decoding
  bool finished(std::size_t tokens) const;             // whether it has ended with this number of tokens
  std::optional<FinishReason> finish_reason() const;   // none until it has ended, and if it failed
  std::exception_ptr error() const;                    // null: it has not failed
  std::int64_t cached_tokens() const;                  // prompt tokens whose K/V came from the prefix cache

 private:
  friend class Scheduler;
  RequestHandle(std::shared_ptr<Job> job, std::weak_ptr<StepLoop> loop);
  Job& job() const;  // throws GenerationError: in a child of the process that submitted it

  std::shared_ptr<Job> job_;
  std::weak_ptr<StepLoop> loop_;
  std::size_t read_ = 0;  // tokens returned by `next`
};

// Created by `Engine::scheduler`. Any thread may submit, cancel and read; one at a time runs the steps.
class Scheduler {
 public:
  Scheduler(Scheduler&&) noexcept;
  Scheduler& operator=(Scheduler&&) noexcept;
  ~Scheduler();  // cancels the requests that have not ended

  // Checks a request and puts it into the queue.
  //
  // config: as in `Engine::stream`.
  // timeout: seconds from now after which it is cancelled; none: never.
  //
  // Throws QueueFullError: the queue is full. GenerationError: as `Engine::stream` throws it; the request needs more K/V
  // memory than kv_tokens; or the scheduler is closed.
  RequestHandle submit(std::vector<std::int64_t> const& prompt, GenerationConfig const& config = {},
                       std::optional<double> timeout = std::nullopt);

  // Runs one step over all requests with a slot; false: there was nothing to do. An error ends the request that caused it.
  bool step() noexcept;

  // Starts a thread that runs the steps until `close`. Throws GenerationError: the system provides no thread.
  void start();

  // Refuses new requests and waits until those submitted have ended; without `drain` they are cancelled.
  void close(bool drain = true);

  std::size_t waiting() const;  // number of requests without a slot
  std::size_t running() const;  // number of requests with a slot
  bool closed() const;          // whether new requests are refused
  bool in_step() const;         // whether this thread is running a step, so that a callback is asking
  std::int64_t kv_tokens() const;  // of all requests with a slot, at most: by the limits, and by memory
  std::int64_t prefix_cache_bytes() const;

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

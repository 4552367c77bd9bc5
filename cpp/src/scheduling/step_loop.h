// Runs the steps of requests: holds their queue, their slots and their batch. `Scheduler`, lists and `TokenStream` use it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "scheduling/job.h"
#include "scheduling/prefix_cache.h"
#include "sequence.h"
#include "tide/scheduler.h"

namespace tide {

class StepLoop {
 public:
  // batch: an empty one of the backend, which nothing else uses. Throws as `open_prefix_cache`.
  // audit: of mode exit; null: none.
  StepLoop(std::shared_ptr<Backend> backend, std::unique_ptr<Batch> batch, SchedulerLimits const& limits,
           std::shared_ptr<Audit> audit);

  // A loop of one job, which has its slot already, whatever memory it may need; of `limits` counts that of prompt tokens.
  // Throws what failed.
  StepLoop(std::shared_ptr<Backend> backend, std::shared_ptr<Job> const& job, SchedulerLimits const& limits);

  // Puts a job into the queue. Throws as `Scheduler::submit` does about the queue and K/V memory.
  void add(std::shared_ptr<Job> job);

  // As `Scheduler`.
  bool step() noexcept;
  void start();
  void close(bool drain);
  std::size_t waiting() const;
  std::size_t running() const;
  bool closed() const;
  bool in_step() const { return stepper_ == std::this_thread::get_id(); }
  std::int64_t kv_tokens() const { return kv_tokens_; }
  std::int64_t prefix_cache_bytes() const { return prefixes_ == nullptr ? 0 : prefixes_->bytes(); }

  // A step by the reader of a handle; false: the thread does them.
  bool drive() noexcept;

  void watch(int descriptor);
  void unwatch(int descriptor);

  void end_together() { together_ = true; }  // only the end of the last job counts

  // A step of a loop of one job. Throws what failed, which does not end the job: the next call goes on from there.
  void step_stream();

  void ask() { asked_ = true; }  // after a job in the queue was cancelled

  std::exception_ptr failure() const { return failure_; }  // the first; not while others step

 private:
  StepLoop(std::shared_ptr<Backend> backend, std::unique_ptr<Batch> batch, SchedulerLimits const& limits,
           std::shared_ptr<Audit> audit, bool is_stream);

  void work() noexcept;
  void tell_watchers() noexcept;
  void end_cancelled() noexcept;
  void admit() noexcept;
  std::vector<double> thresholds_of(Request const& request) const;
  void join(std::shared_ptr<Job> const& job) noexcept;
  void choose_steps() noexcept;
  bool draft() noexcept;
  void show_others(Job& job) const noexcept;
  void keep(std::size_t slot) noexcept;
  void run(std::vector<SlotRequest> const& requests) noexcept;
  void show_time(std::vector<SlotRequest> const& requests, std::vector<StepResult> const& results,
                 double seconds) const noexcept;
  void take(std::size_t slot, StepResult const& result, double seconds) noexcept;
  void fail(std::size_t slot, std::exception_ptr error) noexcept;
  void end(std::size_t slot, std::optional<FinishReason> reason, std::exception_ptr error) noexcept;
  std::optional<FinishReason> ends(Job const& job, double now) const;
  void check() const;  // see invariants.cpp

  Process const process_;  // in a child of it nothing is locked, because no thread may ever unlock it
  std::shared_ptr<Backend> const backend_;
  std::unique_ptr<Batch> const batch_;
  SchedulerLimits const limits_;
  std::unique_ptr<Drafts> drafts_;               // null: there is no drafter, or no job drafts
  std::unique_ptr<PrefixCache> const prefixes_;  // null: there is none
  std::int64_t const kv_tokens_;                 // of all requests with a slot, at most
  std::shared_ptr<Audit> const audit_;           // null: there is none
  bool const is_stream_;                         // of one job, which no failure ends
  std::shared_ptr<SharedDrafting> const shared_;     // of lossless jobs

  std::atomic<std::thread::id> stepper_{};      // the thread that does a step; none: no step is done
  std::mutex stepping_;                         // of what follows up to `mutex_`
  std::vector<std::shared_ptr<Job>> slots_;     // by slot; null: free
  std::vector<std::size_t> order_;              // slots of the present step, in the order in which they get tokens
  std::vector<StepRequest const*> steps_;       // by slot
  std::vector<SlotRequest> requests_, alone_;   // of the present step, and one of them
  std::size_t writing_ = 0, tokens_ = 0;        // jobs that write in the present step, and tokens of these in it
  std::exception_ptr failure_;
  std::int64_t last_ = 0;                       // tokens that one of these may still write, at most
  bool together_ = false;
  std::optional<StepResult> result_;            // of a stream's step, which failed to take it
  double began_ = 0;  // the present step, by `seconds_now`
  bool news_ = false;  // whether a job got tokens or ended in the present step

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> waiting_;
  std::size_t running_ = 0;  // slots that are not free
  std::int64_t arrivals_ = 0;
  bool deadlines_ = false;  // whether a job in the queue has one
  bool closing_ = false, cancelling_ = false;
  std::vector<int> watchers_;  // file descriptors

  std::atomic<bool> asked_{false}, threaded_{false};
  std::mutex starting_;  // of the thread
  std::thread thread_;
};

}  // namespace tide

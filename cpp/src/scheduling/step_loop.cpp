#include "scheduling/step_loop.h"

#include <unistd.h>

#include <algorithm>

#include "decoding/shared_drafting.h"
#include "generation_error.h"
#include "leaving.h"
#include "machine.h"
#include "scheduling/audit.h"
#include "scheduling/kv_memory.h"
#include "tide/errors.h"

namespace tide {

StepLoop::StepLoop(std::shared_ptr<Backend> backend, std::unique_ptr<Batch> batch, SchedulerLimits const& limits,
                   std::shared_ptr<Audit> audit)
    : StepLoop(std::move(backend), std::move(batch), limits, std::move(audit), false) {}

StepLoop::StepLoop(std::shared_ptr<Backend> backend, std::shared_ptr<Job> const& job, SchedulerLimits const& limits)
    : StepLoop(backend, backend->start_batch(1, 1), limits, nullptr, true) {
  running_ = 1;
  join(job);
  if (failure_) std::rethrow_exception(failure_);
}

StepLoop::StepLoop(std::shared_ptr<Backend> backend, std::unique_ptr<Batch> batch, SchedulerLimits const& limits,
                   std::shared_ptr<Audit> audit, bool is_stream)
    : backend_(std::move(backend)),
      batch_(std::move(batch)),
      limits_(limits),
      prefixes_(open_prefix_cache(backend_->manifest(), *batch_, limits.prefix_cache_bytes)),
      kv_tokens_(is_stream ? kNoLimit : kv_tokens_of(*batch_, backend_->manifest(), limits)),
      audit_(std::move(audit)),
      is_stream_(is_stream),
      shared_(std::make_shared<SharedDrafting>(MeasuredCosts::are_assumed() ? nullptr : &backend_->draft_record(),
                                               static_cast<std::size_t>(limits.answer_bytes))),
      slots_(batch_->free_slots()) {
  steps_.resize(slots_.size());  // no step allocates any of these
  order_.reserve(slots_.size());
  requests_.reserve(slots_.size());
  alone_.reserve(1);
}

void StepLoop::add(std::shared_ptr<Job> job) {
  process_.check();
  if (job->reserved() > kv_tokens_) {
    throw GenerationError("prompt and max_new_tokens have " + std::to_string(job->reserved()) +
                          " tokens, and the scheduler has K/V memory for " + std::to_string(kv_tokens_));
  }
  {
    std::lock_guard<std::mutex> const lock(mutex_);
    if (closing_) throw GenerationError("the scheduler is closed: it takes no more requests");
    auto const held = static_cast<std::int64_t>(waiting_.size() + running_);
    if (limits_.waiting && held - limits_.slots >= *limits_.waiting) {
      throw QueueFullError(std::to_string(*limits_.waiting) + " requests are waiting already: submit again later");
    }
    job->number = arrivals_++;
    deadlines_ = deadlines_ || job->has_deadline();
    waiting_.push_back(std::move(job));
  }
  changed_.notify_all();
}

bool StepLoop::step() noexcept {
  if (!process_.is_this() || in_step()) return false;
  Inside const inside;
  std::lock_guard<std::mutex> const stepping(stepping_);
  stepper_ = std::this_thread::get_id();
  end_cancelled();
  admit();
  began_ = seconds_now();
  requests_.clear();
  if (result_) {
    take(0, *std::exchange(result_, std::nullopt), 0);
  } else if (draft()) {
    choose_steps();
  }
  bool const runs = !requests_.empty();
  if (runs) run(requests_);
#ifndef NDEBUG
  check();
#endif
  if (news_) tell_watchers();
  news_ = false;
  stepper_ = std::thread::id();
  return runs || waiting() + running() > 0;
}

void StepLoop::step_stream() {
  process_.check();
  if (in_step()) throw GenerationError("a hook of a stream cannot read the stream that calls it");
  step();
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void StepLoop::watch(int descriptor) {
  process_.check();
  std::lock_guard<std::mutex> const lock(mutex_);
  watchers_.push_back(descriptor);
}

void StepLoop::unwatch(int descriptor) {
  if (!process_.is_this()) return;
  std::lock_guard<std::mutex> const lock(mutex_);
  watchers_.erase(std::remove(watchers_.begin(), watchers_.end(), descriptor), watchers_.end());
}

void StepLoop::tell_watchers() noexcept {
  std::lock_guard<std::mutex> const lock(mutex_);
  for (int const descriptor : watchers_) {
    std::uint64_t const one = 1;  // what an eventfd takes; a pipe takes any bytes
    // One that is full was not read since: its reader will look anyway.
    [[maybe_unused]] auto const written = ::write(descriptor, &one, sizeof one);
  }
}

bool StepLoop::drive() noexcept {
  if (threaded_) return false;
  step();
  return true;
}

void StepLoop::start() {
  process_.check();
  std::lock_guard<std::mutex> const starting(starting_);
  if (thread_.joinable() || closed()) return;
  thread_ = or_generation_error("cannot start the scheduler's thread", [&] { return std::thread([this] { work(); }); });
  threaded_ = true;
}

void StepLoop::close(bool drain) {
  if (!process_.is_this()) return;
  {
    std::lock_guard<std::mutex> const lock(mutex_);
    closing_ = true;
    cancelling_ = cancelling_ || !drain;
  }
  changed_.notify_all();
  if (in_step()) return;  // it ends after the step
  std::lock_guard<std::mutex> const starting(starting_);
  if (thread_.joinable()) thread_.join();
  threaded_ = false;
  while (step()) {
  }
}

std::size_t StepLoop::waiting() const {
  if (!process_.is_this()) return 0;
  std::lock_guard<std::mutex> const lock(mutex_);
  return waiting_.size();
}

std::size_t StepLoop::running() const {
  if (!process_.is_this()) return 0;
  std::lock_guard<std::mutex> const lock(mutex_);
  return running_;
}

bool StepLoop::closed() const {
  if (!process_.is_this()) return true;
  std::lock_guard<std::mutex> const lock(mutex_);
  return closing_;
}

void StepLoop::work() noexcept {
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return closing_ || running_ > 0 || !waiting_.empty(); });
      if (running_ == 0 && waiting_.empty()) return;
    }
    Inside const inside(Inside::refuse);
    if (!inside) return;
    step();
  }
}

// Why a job ends before the next step; none: it does not.
std::optional<FinishReason> StepLoop::ends(Job const& job, double now) const {
  if (job.expired(now)) return FinishReason::timeout;
  if (job.cancelled || cancelling_) return FinishReason::cancelled;
  return std::nullopt;
}

void StepLoop::end_cancelled() noexcept {
  double const now = seconds_now();
  std::unique_lock<std::mutex> lock(mutex_);
  bool const cancelled = asked_.exchange(false) || cancelling_;
  if (cancelled || deadlines_) {  // a long queue is not searched in every step
    deadlines_ = false;
    for (auto at = waiting_.begin(); at != waiting_.end();) {
      if (auto const reason = ends(**at, now)) {
        (*at)->end(reason, nullptr);
        at = waiting_.erase(at);
        news_ = true;
      } else {
        deadlines_ = deadlines_ || (*at)->has_deadline();
        ++at;
      }
    }
  }
  lock.unlock();
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot] == nullptr) continue;
    lock.lock();
    auto const reason = ends(*slots_[slot], now);
    lock.unlock();
    if (reason) end(slot, reason, nullptr);
  }
}

// Gives slots to waiting jobs, first come, first served.
void StepLoop::admit() noexcept {
  std::int64_t room = kv_tokens_;
  for (auto const& job : slots_) room -= job ? job->reserved() : 0;
  while (batch_->free_slots() > 0) {
    std::shared_ptr<Job> job;
    {
      std::lock_guard<std::mutex> const lock(mutex_);
      if (waiting_.empty() || static_cast<std::int64_t>(running_) >= limits_.slots) return;
      job = waiting_.front();
      if (job->reserved() > room) return;
      waiting_.pop_front();
      ++running_;
    }
    room -= job->reserved();
    join(job);
  }
}

// Those of a request that begins now.
std::vector<double> StepLoop::thresholds_of(Request const& request) const {
  bool const audited = audit_ != nullptr && request.auditable();
  return audited ? audit_->raised(request.thresholds) : request.thresholds;
}

void StepLoop::join(std::shared_ptr<Job> const& job) noexcept {
  std::optional<std::size_t> slot;
  try {
    slot = or_generation_error("cannot start a sequence",
                               [&] { return batch_->join(thresholds_of(job->request()), job->request().max_pending); });
    slots_[*slot] = job;
    batch_->sequence(*slot).adapter = job->request().adapter;
    batch_->sequence(*slot).cache_root = job->request().cache_root;
    if (job->request().drafts && drafts_ == nullptr) drafts_ = backend_->start_drafts(slots_.size(), *batch_);
    job->begin(batch_->sequence(*slot), audit_, drafts_ == nullptr ? nullptr : &drafts_->info(), shared_);
  } catch (...) {
    if (slot && !is_stream_) return fail(*slot, std::current_exception());
    {
      std::lock_guard<std::mutex> const lock(mutex_);
      --running_;
    }
    if (!failure_) failure_ = std::current_exception();
    job->end(std::nullopt, std::current_exception());
    news_ = true;
  }
}

// What each job runs in this step: those that write first, then those that read their prompt, each as they came.
void StepLoop::choose_steps() noexcept {
  order_.clear();
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    steps_[slot] = nullptr;
    if (slots_[slot] != nullptr) order_.push_back(slot);
  }
  std::sort(order_.begin(), order_.end(), [&](std::size_t a, std::size_t b) {
    Job const &one = *slots_[a], &other = *slots_[b];
    return one.reads_prompt() != other.reads_prompt() ? other.reads_prompt() : one.number < other.number;
  });
  std::int64_t left = limits_.prompt_tokens, rows = PromptScores::rows(backend_->manifest());
  for (std::size_t const slot : order_) {
    Job& job = *slots_[slot];
    try {
      if (prefixes_ != nullptr && left > 0 && job.unread()) {
        job.skip(prefixes_->begin(slot, job.prompt(), job.request().reads_all()));
      }
      show_others(job);
      std::size_t const before = job.decoder().planned();
      std::int64_t limit = job.scores_prompt() ? std::min(left, rows) : left;
      if (prefixes_ != nullptr && job.reads_prompt()) limit = std::min(limit, prefixes_->max_step_tokens(slot, job.prompt()));
      steps_[slot] = job.next_step(limit, prefixes_ != nullptr && prefixes_->has_states());
      tokens_ += job.decoder().planned() - before;
      if (steps_[slot] != nullptr && !steps_[slot]->thresholds.empty()) {
        batch_->sequence(slot).rule.thresholds = steps_[slot]->thresholds;
      }
    } catch (...) {
      fail(slot, std::current_exception());
      continue;
    }
    auto const count = static_cast<std::int64_t>(steps_[slot] == nullptr ? 0 : steps_[slot]->ids.size());
    if (job.reads_prompt()) left -= count;
    if (job.scores_prompt()) rows -= count;
  }
  requests_.clear();
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (steps_[slot] != nullptr) requests_.push_back({slot, *steps_[slot], slots_[slot]->verifies()});
  }
}

// Caches a job's text. Where there is no memory for them the cache does not grow.
void StepLoop::keep(std::size_t slot) noexcept {
  if (prefixes_ == nullptr) return;
  try {
    prefixes_->keep(slot, slots_[slot]->text(), slots_[slot]->prompt().size());
  } catch (...) {
  }
}

// Runs a step. One that fails for several jobs is repeated for each alone, so that only those end whose own step fails.
void StepLoop::run(std::vector<SlotRequest> const& requests) noexcept {
  try {
    double const started = seconds_now();
    std::vector<StepResult> const results = batch_->step(requests);
    double const ended = seconds_now(), seconds = ended - began_;
    show_time(requests, results, ended - started);
    for (std::size_t i = 0; i < requests.size(); ++i) take(requests[i].slot, results[i], seconds);
  } catch (...) {  // of the step alone: `take` throws nothing
    began_ = seconds_now();
    if (requests.size() == 1) return fail(requests[0].slot, std::current_exception());
    for (SlotRequest const& request : requests) {
      alone_.clear();
      alone_.push_back(request);
      run(alone_);
    }
  }
}

// Corrects what steps cost by one that ran every segment over all of its tokens, none of a prompt; or one that exited.
void StepLoop::show_time(std::vector<SlotRequest> const& requests, std::vector<StepResult> const& results,
                         double seconds) const noexcept {
  auto const depth = static_cast<std::int64_t>(backend_->manifest().checkpoints.size() + 1);
  std::size_t tokens = 0;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    StepRequest const& step = requests[i].request;
    std::int64_t const ran = results[i].segments_run;
    if (slots_[requests[i].slot]->reads_prompt()) return;
    if (ran < depth && requests.size() == 1 && step.ids.size() == 1) {
      return backend_->costs().exited(static_cast<std::size_t>(ran - 1), seconds);
    }
    if (ran < depth || static_cast<std::int64_t>(step.ids.size()) != step.logits_to_keep) return;
    tokens += step.ids.size();
  }
  backend_->costs().ran(tokens, seconds);
}

void StepLoop::take(std::size_t slot, StepResult const& result, double seconds) noexcept {
  try {
    bool const read = slots_[slot]->reads_prompt();
    news_ = true;
    if (slots_[slot]->take(result, seconds)) return end(slot, std::nullopt, nullptr);
    if (read || (prefixes_ != nullptr && prefixes_->due(slot, slots_[slot]->prompt().size()) > 0)) keep(slot);
  } catch (...) {  // logits that are not finite, no memory, or a callback's exception
    if (is_stream_) result_ = result;
    fail(slot, std::current_exception());
  }
}

void StepLoop::fail(std::size_t slot, std::exception_ptr error) noexcept {
  if (!failure_) failure_ = error;
  if (!is_stream_) end(slot, std::nullopt, std::move(error));
}

void StepLoop::end(std::size_t slot, std::optional<FinishReason> reason, std::exception_ptr error) noexcept {
  if (!error) keep(slot);
  news_ = true;
  std::shared_ptr<Job> const job = std::move(slots_[slot]);
  if (!error && shared_->answers && job->request().drafts) {
    shared_->answers->add(job->request().cache_root, job->prompt(), job->tokens());
  }
  batch_->leave(slot);
  if (drafts_ != nullptr) drafts_->leave(slot);
  {
    std::lock_guard<std::mutex> const lock(mutex_);
    --running_;
  }
  job->end(reason, std::move(error));
}

}  // namespace tide

#include "tide/scheduler.h"

#include "generation_error.h"
#include "machine.h"
#include "scheduling/audit.h"
#include "scheduling/job.h"
#include "scheduling/step_loop.h"
#include "sequence.h"

namespace tide {

Scheduler::Scheduler(Engine engine, std::int64_t slots, std::shared_ptr<StepLoop> loop, std::shared_ptr<Audit> audit)
    : engine_(std::move(engine)), slots_(slots), loop_(std::move(loop)), audit_(std::move(audit)) {}

Scheduler::Scheduler(Scheduler&&) noexcept = default;

Scheduler& Scheduler::operator=(Scheduler&& other) noexcept {
  std::swap(engine_, other.engine_);
  std::swap(slots_, other.slots_);
  std::swap(loop_, other.loop_);
  std::swap(audit_, other.audit_);
  return *this;
}

Scheduler::~Scheduler() {
  if (loop_ != nullptr) loop_->close(false);
}

RequestHandle Scheduler::submit(std::vector<std::int64_t> const& prompt, GenerationConfig const& config,
                                std::optional<double> timeout) {
  Backend& backend = *engine_.backend_;
  Bundle const& bundle = backend.bundle();
  check_prompt(bundle.manifest, prompt, "the prompt");
  auto const request =
      std::make_shared<Request>(backend, without_auto(bundle, config, engine_.auto_mode(slots_), false), std::nullopt);
  std::optional<double> deadline;
  if (timeout) deadline = seconds_now() + real_number("timeout", *timeout);
  std::shared_ptr<Job> const job(new Job(bundle.manifest, prompt, request, 0, deadline, nullptr), Process());
  RequestHandle handle(job, loop_);
  loop_->add(job);
  return handle;
}

bool Scheduler::step() noexcept { return loop_->step(); }
void Scheduler::start() { loop_->start(); }
void Scheduler::close(bool drain) { loop_->close(drain); }
std::size_t Scheduler::waiting() const { return loop_->waiting(); }
std::size_t Scheduler::running() const { return loop_->running(); }
bool Scheduler::closed() const { return loop_->closed(); }
bool Scheduler::in_step() const { return loop_->in_step(); }
std::int64_t Scheduler::kv_tokens() const { return loop_->kv_tokens(); }
std::int64_t Scheduler::prefix_cache_bytes() const { return loop_->prefix_cache_bytes(); }
std::optional<AuditState> Scheduler::audit() const {
  return audit_ == nullptr ? std::nullopt : std::optional(audit_->state());
}

void Scheduler::watch(int descriptor) { loop_->watch(descriptor); }
void Scheduler::unwatch(int descriptor) { loop_->unwatch(descriptor); }

RequestHandle::RequestHandle(std::shared_ptr<Job> job, std::weak_ptr<StepLoop> loop)
    : job_(std::move(job)), loop_(std::move(loop)) {}

Job& RequestHandle::job() const {
  job_->process().check();
  return *job_;
}

std::optional<Token> RequestHandle::next() {
  while (!job().ready(read_)) {
    auto const loop = loop_.lock();
    if (loop != nullptr && loop->in_step()) {
      throw GenerationError("a hook of a request cannot wait for the scheduler that calls it");
    }
    if (loop == nullptr || !loop->drive()) job_->wait(read_, std::nullopt);
  }
  std::optional<Token> token = job_->token(read_);
  if (token) ++read_;
  return token;
}

Generation RequestHandle::result() {
  while (next()) {
  }
  return job_->generation();
}

void RequestHandle::cancel() {
  job_->cancelled = true;
  if (auto const loop = loop_.lock()) loop->ask();
}

std::size_t RequestHandle::read(std::size_t from, std::int64_t* ids, std::size_t room) const {
  return job().read(from, ids, room);
}

void RequestHandle::wait(std::size_t from, double seconds) const { job().wait(from, seconds); }
bool RequestHandle::finished(std::size_t from) const { return job().finished(from); }
std::optional<Token> RequestHandle::token(std::size_t number) const { return job().token(number); }
std::string RequestHandle::text(std::size_t from) const { return job().shown(from); }
Generation RequestHandle::so_far() const { return job().generation(); }
Mode RequestHandle::mode() const { return job_->request().mode; }
std::optional<FinishReason> RequestHandle::finish_reason() const { return job().finish_reason(); }
std::exception_ptr RequestHandle::error() const { return job_->error(); }
std::int64_t RequestHandle::cached_tokens() const { return job_->cached_tokens(); }

}  // namespace tide

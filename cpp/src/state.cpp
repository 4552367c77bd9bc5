// Steps a batch of one sequence, whatever backend runs it.
#include "tide/state.h"

#include "generation_error.h"
#include "request.h"
#include "sequence.h"

namespace tide {

State::State(std::shared_ptr<Backend> backend, std::vector<double> const& thresholds, std::int64_t max_pending,
             std::int64_t adapter)
    : backend_(std::move(backend)), batch_(backend_->start_batch(1, 1)) {
  batch_->join(thresholds, max_pending);
  batch_->sequence(0).adapter = adapter;
  batch_->sequence(0).scores = true;
}
State::State(State&&) noexcept = default;
State& State::operator=(State&& other) noexcept {
  batch_ = std::move(other.batch_);  // before the backend, which it must not outlive
  backend_ = std::move(other.backend_);
  return *this;
}
State::~State() {
  if (backend_ != nullptr && !backend_->process().is_this()) batch_.release();
}

StepResult State::step(std::int64_t const* ids, std::size_t count, std::int64_t logits_to_keep, bool full) {
  backend_->process().check();
  StepRequest const request{{ids, ids + count}, whole_number("logits_to_keep", logits_to_keep, 1), full};
  check_vocabulary(backend_->manifest(), request.ids, "a step");
  return or_generation_error("the step failed", [&] { return batch_->step({{0, request}})[0]; });
}

StepResult State::step(std::vector<std::int64_t> const& ids, std::int64_t logits_to_keep, bool full) {
  return step(ids.data(), ids.size(), logits_to_keep, full);
}

void State::rewind(std::int64_t length) {
  or_generation_error("the rewind failed", [&] { batch_->sequence(0).rewind(length); });
}

void State::set_thresholds(std::vector<double> const& thresholds) {
  check_thresholds(backend_->manifest(), thresholds);
  batch_->sequence(0).rule.thresholds.assign(thresholds.begin(), thresholds.end());
}

std::int64_t State::length() const { return lengths()[0]; }
std::vector<std::int64_t> const& State::lengths() const { return batch_->sequence(0).lengths; }
std::vector<std::int64_t> State::pending() const {
  std::vector<std::int64_t> tokens;
  for (std::size_t k = 1; k < lengths().size(); ++k) tokens.push_back(lengths()[k - 1] - lengths()[k]);
  return tokens;
}

}  // namespace tide

// Checks the arguments of a state's methods, whatever backend runs the sequence.
#include "tide/state.h"

#include "generation_error.h"
#include "request.h"
#include "sequence.h"
#include "tide/errors.h"

namespace tide {

State::State(std::shared_ptr<Backend> backend, std::vector<double> const& thresholds, std::int64_t max_pending)
    : backend_(std::move(backend)),
      sequence_(backend_->start({thresholds.begin(), thresholds.end()}, max_pending)) {}
State::State(State&&) noexcept = default;
State& State::operator=(State&& other) noexcept {
  sequence_ = std::move(other.sequence_);  // before the backend, which it must not outlive
  backend_ = std::move(other.backend_);
  return *this;
}
State::~State() {
  if (backend_ != nullptr && !backend_->process().is_this()) sequence_.release();
}

StepResult State::step(std::int64_t const* ids, std::size_t count, std::int64_t logits_to_keep, bool full) {
  backend_->process().check();
  std::int64_t const vocabulary = backend_->manifest().model.vocab_size;
  for (std::size_t i = 0; i < count; ++i) {
    if (ids[i] >= 0 && ids[i] < vocabulary) continue;
    throw GenerationError("a step holds token id " + std::to_string(ids[i]) + ", outside the vocabulary 0.." +
                          std::to_string(vocabulary - 1));
  }
  std::int64_t const total = length_after(length(), count, sequence_->limit());
  whole_number("logits_to_keep", logits_to_keep, 1);
  return or_generation_error("the step failed",
                             [&] { return sequence_->step(ids, count, total, logits_to_keep, full); });
}

StepResult State::step(std::vector<std::int64_t> const& ids, std::int64_t logits_to_keep, bool full) {
  return step(ids.data(), ids.size(), logits_to_keep, full);
}

void State::use_candidates(std::size_t count) {
  sequence_->candidates = count;
  sequence_->scores = false;
}

void State::settle(std::int64_t tokens) { sequence_->settled = tokens; }

void State::use_adapter(std::int64_t adapter) { sequence_->adapter = adapter; }

void State::use_states(bool states) { sequence_->states = states; }

void State::rewind(std::int64_t length) {
  check_rewind(this->length(), length);
  or_generation_error("the rewind failed", [&] { sequence_->rewind(length); });
}

void State::set_thresholds(std::vector<double> const& thresholds) {
  check_thresholds(backend_->manifest(), thresholds);
  sequence_->set_thresholds({thresholds.begin(), thresholds.end()});
}

std::int64_t State::length() const { return lengths()[0]; }
std::vector<std::int64_t> const& State::lengths() const { return sequence_->lengths(); }
std::vector<std::int64_t> State::pending() const {
  std::vector<std::int64_t> tokens;
  for (std::size_t k = 1; k < lengths().size(); ++k) tokens.push_back(lengths()[k - 1] - lengths()[k]);
  return tokens;
}

}  // namespace tide

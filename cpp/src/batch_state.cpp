// Checks the arguments of a batch's methods, whatever backend runs it.
#include "tide/batch.h"

#include "generation_error.h"
#include "request.h"
#include "sequence.h"

namespace tide {

BatchState::BatchState(std::shared_ptr<Backend> backend, double compaction_threshold, std::size_t slots)
    : backend_(std::move(backend)),
      batch_(backend_->start_batch(number_within("compaction_threshold", compaction_threshold, 0, 1), slots)),
      taken_(batch_->free_slots()) {}
BatchState::BatchState(BatchState&&) noexcept = default;
BatchState& BatchState::operator=(BatchState&& other) noexcept {
  batch_ = std::move(other.batch_);  // before the backend, which it must not outlive
  backend_ = std::move(other.backend_);
  taken_ = std::move(other.taken_);
  return *this;
}
BatchState::~BatchState() {
  if (backend_ != nullptr && !backend_->process().is_this()) batch_.release();
}

std::size_t BatchState::free_slots() const { return batch_->free_slots(); }

std::size_t BatchState::join(std::vector<double> const& thresholds, std::int64_t max_pending,
                             std::optional<std::string> const& adapter) {
  std::int64_t const row = adapter_of(*backend_, adapter);
  check_thresholds(backend_->manifest(), thresholds);
  whole_number("max_pending", max_pending, 0);
  if (batch_->free_slots() == 0) throw GenerationError("the batch has no free slot: let a sequence leave first");
  std::size_t const slot = or_generation_error("cannot start a sequence",
                                               [&] { return batch_->join(thresholds, max_pending); });
  batch_->sequence(slot).adapter = row;
  taken_[slot] = true;
  return slot;
}

void BatchState::leave(std::size_t slot) {
  check(slot);
  batch_->leave(slot);
  taken_[slot] = false;
}

std::vector<StepResult> BatchState::step(std::vector<SlotStep> const& steps) {
  backend_->process().check();
  std::vector<StepRequest> requests;
  std::vector<SlotRequest> slots;
  requests.reserve(steps.size());  // `slots` refers to them
  for (SlotStep const& step : steps) {
    check(step.slot);
    if (!slots.empty() && slots.back().slot >= step.slot) throw GenerationError("a step takes slots in ascending order");
    check_vocabulary(backend_->manifest(), step.ids, "a step");
    requests.push_back({step.ids, whole_number("logits_to_keep", step.logits_to_keep.value_or(1), 1), step.full});
    slots.push_back({step.slot, requests.back(), step.logits_to_keep.has_value()});
  }
  return or_generation_error("the step failed", [&] { return batch_->step(slots); });
}

void BatchState::rewind(std::size_t slot, std::int64_t length) {
  check(slot);
  or_generation_error("the rewind failed", [&] { batch_->sequence(slot).rewind(length); });
}

std::vector<std::int64_t> BatchState::lengths(std::size_t slot) const {
  check(slot);
  return batch_->sequence(slot).lengths;
}

void BatchState::check(std::size_t slot) const {
  if (slot < taken_.size() && taken_[slot]) return;
  throw GenerationError("slot " + std::to_string(slot) + " of the batch has no sequence");
}

}  // namespace tide

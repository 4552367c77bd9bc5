#include "segmented/batch.h"

#include <algorithm>

#include "generation_error.h"

namespace tide {
namespace {

bool is_free(std::unique_ptr<Sequence> const& slot) { return slot == nullptr; }

}  // namespace

SegmentedBatch::SegmentedBatch(SegmentBackend& backend, std::unique_ptr<SegmentBuffers> buffers,
                               double compaction_threshold, std::size_t slots)
    : backend_(backend),
      steps_(std::move(buffers), backend.manifest()),
      compaction_threshold_(compaction_threshold),
      slots_(slots) {}

SegmentedBatch::~SegmentedBatch() { backend_.give_back(steps_.take_buffers()); }

std::size_t SegmentedBatch::free_slots() const {
  return static_cast<std::size_t>(std::count_if(slots_.begin(), slots_.end(), is_free));
}

std::size_t SegmentedBatch::join(std::vector<double> const& thresholds, std::int64_t max_pending) {
  auto const slot = static_cast<std::size_t>(std::find_if(slots_.begin(), slots_.end(), is_free) - slots_.begin());
  ExitRule rule{{thresholds.begin(), thresholds.end()}, max_pending};
  auto joining = std::make_unique<Sequence>(backend_.manifest(), std::move(rule));
  steps_.buffers().clear(slot);  // of what an earlier sequence left there
  slots_[slot] = std::move(joining);
  return slot;
}

void SegmentedBatch::leave(std::size_t slot) noexcept { slots_[slot].reset(); }

std::vector<StepResult> SegmentedBatch::step(std::vector<SlotRequest> const& requests) {
  return or_generation_error("the step failed",
                             [&] { return steps_.step(slots_, requests, compaction_threshold_); });
}

}  // namespace tide

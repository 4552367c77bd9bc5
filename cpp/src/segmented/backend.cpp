#include "segmented/backend.h"

#include <algorithm>

#include "generation_error.h"
#include "segmented/batch.h"
#include "tide/errors.h"

namespace tide {

SegmentBackend::SegmentBackend(Bundle bundle, std::string provider, std::vector<NetworkSpec> specs,
                               std::function<DeviceNetworks()> open_device)
    : Backend(std::move(bundle), std::move(provider)), specs_(std::move(specs)), open_device_(std::move(open_device)) {}

std::size_t SegmentBackend::max_batch_size() const {
  return static_cast<std::size_t>(manifest().networks->max_batch_size);
}

std::unique_ptr<Batch> SegmentBackend::start_batch(double compaction_threshold, std::size_t slots) {
  if (max_batch_size() == 1) {
    throw GenerationError(
        "the networks of this bundle take one sequence at a time (exported with --batch-size 1, or the export said why): "
        "give one prompt at a time, or use provider 'cpu'");
  }
  return or_generation_error("cannot start a batch", [&] {
    std::size_t const count = std::min(slots, max_batch_size());
    return std::make_unique<SegmentedBatch>(*this, take(idle_batches_, count), compaction_threshold, count);
  });
}

std::unique_ptr<SegmentBuffers> SegmentBackend::take(Idle& idle, std::size_t slots) {
  std::unique_ptr<SegmentBuffers> buffers = idle.pop(slots);
  if (buffers == nullptr) {
    return std::make_unique<SegmentBuffers>(specs_, open_device_(), *manifest().networks, slots);
  }
  for (std::size_t slot = 0; slot < buffers->slots(); ++slot) buffers->clear(slot);
  return buffers;
}

std::unique_ptr<SegmentBuffers> SegmentBackend::Idle::pop(std::size_t slots) {
  std::lock_guard<std::mutex> const lock(mutex_);
  auto const fits = [&](auto const& buffers) { return buffers->slots() >= slots; };
  auto const found = std::find_if(buffers_.begin(), buffers_.end(), fits);
  if (found == buffers_.end()) {
    buffers_.clear();
    buffers_.reserve(++made_);  // `push` must not throw
    return nullptr;
  }
  std::unique_ptr<SegmentBuffers> buffers = std::move(*found);
  buffers_.erase(found);
  return buffers;
}

void SegmentBackend::Idle::push(std::unique_ptr<SegmentBuffers> buffers) noexcept {
  std::lock_guard<std::mutex> const lock(mutex_);
  buffers_.push_back(std::move(buffers));
}

}  // namespace tide

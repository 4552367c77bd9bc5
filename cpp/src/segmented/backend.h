// What all sequences on a bundle's segment networks share: the networks, and buffers that are used again. A sequence's
// buffers, and what its device has recorded, are expensive to make: those of one that has ended serve the next one.
#pragma once

#include <functional>
#include <mutex>

#include "segmented/memory.h"
#include "sequence.h"

namespace tide {

class SegmentBackend final : public Backend {
 public:
  // open_device: returns a new device with the networks on it, which keep alive what they need.
  SegmentBackend(Bundle bundle, std::string provider, std::vector<NetworkSpec> specs,
                 std::function<DeviceNetworks()> open_device);

  // Throws GenerationError: not enough memory for another sequence's buffers.
  std::unique_ptr<Sequence> start(std::vector<float> const& thresholds, std::int64_t max_pending) override;

  std::size_t max_batch_size() const override;

  // See `Backend::start_batch`. Idle buffers that are too small are freed, so that two sizes are never held.
  std::unique_ptr<Batch> start_batch(double compaction_threshold, std::size_t slots) override;

  // Take back the buffers of a sequence, or of a batch, that has ended.
  void give_back(std::unique_ptr<SegmentBuffers> buffers) noexcept { idle_.push(std::move(buffers)); }
  void give_back_batch(std::unique_ptr<SegmentBuffers> buffers) noexcept { idle_batches_.push(std::move(buffers)); }

 private:
  // Buffers that nothing uses. May be used by several threads at once.
  class Idle {
   public:
    // Buffers of `slots` slots or more; null: there are none, and room is kept for new ones. Smaller ones are freed.
    std::unique_ptr<SegmentBuffers> pop(std::size_t slots);
    void push(std::unique_ptr<SegmentBuffers> buffers) noexcept;

   private:
    std::mutex mutex_;
    std::size_t made_ = 0;  // times that there were none
    std::vector<std::unique_ptr<SegmentBuffers>> buffers_;
  };

  std::unique_ptr<SegmentBuffers> take(Idle& idle, std::size_t slots);

  std::vector<NetworkSpec> const specs_;
  std::function<DeviceNetworks()> const open_device_;
  Idle idle_, idle_batches_;
};

}  // namespace tide

// Runs a bundle's segment networks for all sequences. Buffers and recordings are expensive to create, so those of a batch that
// has ended serve the next.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "segmented/segmented_drafts.h"
#include "segmented/idle.h"
#include "segmented/memory.h"
#include "sequence.h"

namespace tide {

class SegmentBackend final : public Backend {
 public:
  using OpenDevice = std::function<DeviceNetworks(NetworksOf part)>;

  // specs: of all networks that `open_device` opens, the drafter's last, if there is one.
  // open_device: returns a new device with the networks on it, which keep alive what they need.
  SegmentBackend(Bundle bundle, std::string provider, std::vector<NetworkSpec> specs, OpenDevice open_device);

  std::unique_ptr<Drafts> start_drafts(std::size_t slots, Batch& batch) override;

  std::size_t max_batch_size() const override;

  // See `Backend::start_batch`. Idle buffers that are too small are freed, so that two sizes are never held.
  std::unique_ptr<Batch> start_batch(double compaction_threshold, std::size_t slots) override;

  // Take back the buffers of a batch, or of drafts, that have ended.
  void give_back(std::unique_ptr<SegmentBuffers> buffers) noexcept;
  void give_back_drafts(std::unique_ptr<DraftBuffers> buffers) noexcept { idle_drafts_.push(std::move(buffers)); }

 private:
  // Opens networks with the embedding that they read.
  DeviceNetworks open(NetworksOf part);

  std::unique_ptr<SegmentBuffers> take(std::size_t slots);

  std::vector<NetworkSpec> specs_;
  std::optional<NetworkSpec> drafter_spec_;
  std::optional<DraftsInfo> drafts_info_;
  OpenDevice const open_device_;
  std::mutex embedding_mutex_;
  Buffer embedding_;  // once for all devices, which are on one GPU; none: it has not been read, or there is none
  Idle<SegmentBuffers> idle_, idle_batches_;  // of one slot, of several
  Idle<DraftBuffers> idle_drafts_;
};

}  // namespace tide

// The backend on segment networks: the loaded networks, and buffers that are used again. Buffers and their device's
// recordings are expensive to make: those of a sequence that has ended serve the next one.
#pragma once

#include <functional>
#include <mutex>

#include "sequence.h"
#include "segmented/sequence_memory.h"

namespace tide {

class SegmentBackend final : public Backend {
 public:
  // open_device: returns a new device with the networks on it, which keep alive what they need.
  SegmentBackend(Bundle bundle, std::string provider, std::vector<NetworkSpec> specs,
                 std::function<DeviceNetworks()> open_device);

  // Throws GenerationError: not enough memory for another sequence's buffers.
  std::unique_ptr<Sequence> start(std::vector<float> const& thresholds, std::int64_t max_pending,
                                  std::int64_t room) override;

  // Takes back the buffers of a sequence that has ended.
  void give_back(std::unique_ptr<SequenceBuffers> buffers);

 private:
  std::unique_ptr<SequenceBuffers> take();

  std::vector<NetworkSpec> const specs_;
  std::function<DeviceNetworks()> const open_device_;
  std::mutex mutex_;
  std::size_t allocated_ = 0;  // buffers allocated so far
  std::vector<std::unique_ptr<SequenceBuffers>> free_;
};

}  // namespace tide

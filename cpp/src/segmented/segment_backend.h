// What all sequences on a bundle's segment networks share: the loaded networks, and lanes that are used again. A lane's
// buffers, and what its device has recorded, are worth keeping: when a sequence is gone its lane serves the next one.
#pragma once

#include <functional>
#include <mutex>

#include "segmented/sequence_memory.h"
#include "backend.h"

namespace tide {

class SegmentSession final : public Session {
 public:
  // `open_lane` gives a new device and the networks on it, one set per lane; it keeps what they need alive.
  SegmentSession(Bundle bundle, std::vector<NetworkSpec> specs, std::function<LaneParts()> open_lane);

  // Throws GenerationError: no memory for another lane.
  std::unique_ptr<Sequence> start(std::vector<float> const& thresholds, std::int64_t max_pending,
                                  std::int64_t room) override;

  // A lane that a sequence no longer needs.
  void give_back(std::unique_ptr<Lane> lane);

 private:
  std::unique_ptr<Lane> take();

  std::vector<NetworkSpec> const specs_;
  std::int64_t const waiting_rows_;
  std::function<LaneParts()> const open_lane_;
  std::mutex mutex_;
  std::size_t lanes_ = 0;  // that were ever opened
  std::vector<std::unique_ptr<Lane>> free_;
};

}  // namespace tide

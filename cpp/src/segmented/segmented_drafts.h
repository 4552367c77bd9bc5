// Runs the drafter's network on the same kind of device as the segments: its K/V stay there, tokens and hidden states go in,
// logits and the next hidden states come back.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "decoding/drafts.h"
#include "segmented/memory.h"
#include "segmented/network_spec.h"
#include "segmented/run_plan.h"

namespace tide {

class SegmentBackend;

// The drafter's buffers of some slots on a device, and its runs. May be used by one thread at a time.
class DraftBuffers {
 public:
  // spec, info: must outlive it. Throws GenerationError: the device has not enough memory.
  DraftBuffers(NetworkSpec const& spec, DeviceNetworks device_networks, NetworksInfo const& sizes, DraftsInfo const& info,
               std::size_t slots);
  DraftBuffers(DraftBuffers const&) = delete;
  DraftBuffers& operator=(DraftBuffers const&) = delete;
  ~DraftBuffers();

  std::size_t slots() const { return lengths_.size(); }
  DraftsInfo const& info() const { return info_; }

  void leave(std::size_t slot) noexcept { lengths_[slot] = 0; }  // removes the rows of a slot

  // See `Drafts::run`.
  std::vector<DraftResult> run(std::vector<SlotDraft> const& drafts);

 private:
  enum Input : std::size_t { kLengths, kLast, kIds, kHidden };  // parts of the small inputs
  enum Output : std::size_t { kLogits, kNewHidden };            // and of the small outputs

  // Zeroes what was written in a slot, and removes its rows: zero times NaN would be NaN.
  void clear(std::size_t slot);
  void run(Run const& run, std::vector<SlotDraft const*> const& by_slot, std::vector<std::int64_t> const& done);

  NetworkSpec const& spec_;
  DraftsInfo const& info_;
  NetworksInfo sizes_;  // with the capacity of the drafter's K/V
  std::unique_ptr<Device> const device_;
  std::vector<std::unique_ptr<Network>> const networks_;  // one
  std::string const dtype_;                               // of hidden states
  std::vector<std::int64_t> lengths_, written_;           // rows of each slot, and rows whose K/V may not be zero
  std::unique_ptr<Block> indices_, inputs_, outputs_;
  Buffer const embedding_;
  std::vector<Buffer> kv_;                 // as the specification lists them
  std::vector<float> logits_, hidden_;     // of the last rows, by slot
};

// Drafts on these buffers, which the backend gets back.
class SegmentedDrafts final : public Drafts {
 public:
  SegmentedDrafts(SegmentBackend& backend, std::unique_ptr<DraftBuffers> buffers)
      : backend_(backend), buffers_(std::move(buffers)) {}
  ~SegmentedDrafts() override;

  DraftsInfo const& info() const override { return buffers_->info(); }
  std::vector<DraftResult> run(std::vector<SlotDraft> const& drafts) override { return buffers_->run(drafts); }
  void leave(std::size_t slot) noexcept override { buffers_->leave(slot); }

 private:
  SegmentBackend& backend_;
  std::unique_ptr<DraftBuffers> buffers_;
};

}  // namespace tide

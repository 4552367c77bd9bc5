// The buffers of one sequence on a device, and the runs of its networks over them.
//
// `SegmentedSequence` decides which segment runs over which tokens; `SequenceBuffers` knows where they are. What the
// sequence leaves for later runs is on the device, in buffers that the networks read and update in place: K/V, the hidden
// states pending before each segment but the first, and the exit states that the head reads. Their addresses never
// change. Only token ids, lengths, thresholds, the routers' decisions and the logits are copied between device and host.
//
// Runs are padded to a power of two, so that a device that records its work (a CUDA graph per network and number of
// tokens) has few recordings. Padding follows the last token, in all buffers, and is overwritten before it is read.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "segmented/device.h"
#include "segmented/head.h"
#include "segmented/network_spec.h"

namespace tide {

// A router's score and decision for the last token of its segment's last run.
struct Decision {
  float score;
  bool exits;
};

// A device, and the networks of `network_specs` on it.
struct DeviceNetworks {
  std::unique_ptr<Device> device;
  std::vector<std::unique_ptr<Network>> networks;  // destroyed before the device
};

// May be used by one thread at a time.
class SequenceBuffers {
 public:
  // Allocates buffers for the networks' capacity. `specs` and `info` must outlive it. Throws GenerationError: the device
  // has not enough memory.
  SequenceBuffers(std::vector<NetworkSpec> const& specs, DeviceNetworks device_networks, NetworksInfo const& info);
  SequenceBuffers(SequenceBuffers const&) = delete;
  SequenceBuffers& operator=(SequenceBuffers const&) = delete;
  ~SequenceBuffers();

  // Zeroes the buffers for another sequence. Attention multiplies masked K/V by zero, and zero times NaN is NaN: a
  // sequence whose states overflowed must leave nothing behind. Throws GenerationError: the device has failed.
  void clear();

  // Runs segment k over all tokens pending before it.
  //
  // ids: the `count` new tokens, for segment 0.
  // count: tokens to run over, at most `max_tokens`; length: tokens in the segment's K/V cache.
  // pending: tokens that are already pending before the next segment.
  // threshold: a score above it exits.
  //
  // Throws GenerationError: the device failed.
  void run(std::size_t k, std::int64_t const* ids, std::int64_t count, std::int64_t length, std::int64_t pending,
           float threshold);

  // The router's decision in segment k's last run; waits for it.
  Decision decision(std::size_t k);

  // Appends what the head gives on `count` rows of the exit states (names::kExitRow, names::kFinalRow): see `Head`.
  void append_logits(std::int64_t first_row, std::int64_t count, std::vector<float>& logits);
  void append_candidates(std::int64_t first_row, std::int64_t count, std::size_t needed, std::vector<Candidates>& found);

  Head const& head() const { return *head_; }

  NetworksInfo const& info() const { return info_; }

 private:
  struct Segment {
    NetworkSpec const* spec;
    std::vector<std::byte*> addresses;  // of its tensors
    Buffer control, control_host;       // its small inputs, which are copied at once
    Buffer decision, decision_host;     // its router's outputs
    bool queued = false;                // the queue may still read or write the host's
    std::int64_t written = 0;           // tokens of its K/V buffers that may not be zero
  };

  Buffer allocate(std::size_t size) { return device_->allocate(std::max(size, kAlignment)); }
  void add_segment(std::size_t k);
  void synchronize();
  void nothing_queued();

  std::vector<NetworkSpec> const& specs_;
  NetworksInfo const& info_;
  std::unique_ptr<Device> const device_;
  std::vector<std::unique_ptr<Network>> const networks_;
  std::vector<Segment> segments_;
  std::vector<Buffer> owned_, pending_;  // K/V; states before each segment but the first
  Buffer exits_, indices_, indices_host_;
  std::unique_ptr<Head> head_;
};

}  // namespace tide

// The buffers of one sequence on a device, and the runs of its networks over them.
//
// `SegmentedSequence` decides which segment runs over which tokens; `SequenceBuffers` knows where they are. Every
// segment but the first has a pending buffer of hidden states, one row per token, which grows: a segment reads its rows
// there and writes the new ones to the next segment's. Only token ids, lengths, the routers' decisions and the logits
// are copied between device and host.
//
// Runs are padded to a power of two, so that a device that records its work (a CUDA graph per network and number of
// tokens) has few recordings. Padding follows the last token, in the buffers and in the K/V cache, and is overwritten
// before it is read.
#pragma once

#include <algorithm>
#include <memory>
#include <set>
#include <vector>

#include "segmented/device.h"
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
  // Allocates K/V buffers for the networks' capacity, and pending buffers for the manifest's `max_pending`. `specs` and
  // `manifest`, which must have networks, must outlive it. Throws GenerationError: the device has not enough memory.
  SequenceBuffers(std::vector<NetworkSpec> const& specs, DeviceNetworks device_networks, Manifest const& manifest);
  SequenceBuffers(SequenceBuffers const&) = delete;
  SequenceBuffers& operator=(SequenceBuffers const&) = delete;
  ~SequenceBuffers();

  // Zeroes the buffers for another sequence. Attention multiplies masked K/V by zero, and zero times NaN is NaN: a
  // sequence whose states overflowed must leave nothing behind. Throws GenerationError: the device has failed.
  void clear();

  // Sets the exit threshold of segment k's router from its next run on.
  void set_threshold(std::size_t k, float threshold);

  // Runs segment k over all its pending tokens, in as many chunks as necessary.
  //
  // ids: the `count` new tokens, for segment 0.
  // count: tokens to run over; length: tokens in the segment's K/V cache.
  // target: row of the next segment's pending buffer for the first new hidden state.
  // keep: last segment: number of last tokens whose logits `position_logits` returns.
  //
  // Throws GenerationError: the device has not enough memory, or failed.
  void run(std::size_t k, std::int64_t const* ids, std::int64_t count, std::int64_t length, std::int64_t target,
           std::int64_t keep);

  // The router's decision in segment k's last run; waits for it.
  Decision decision(std::size_t k);

  // Logits of the last token after segment k: float32 [V], valid until the next call.
  float const* logits(std::size_t k);

  // Logits of the last `keep` tokens of the last segment's last run: float32 [keep, V], valid until the next call.
  float const* position_logits();

 private:
  struct Segment {
    NetworkSpec const* spec;
    std::vector<std::byte*> addresses;  // of its tensors; those of input and output differ from run to run
    std::size_t input, output;          // indices of the states' tensors
    std::byte* exit_states;
    Buffer control, control_host;    // its small inputs, which are copied at once
    Buffer decision, decision_host;  // its router's outputs
    std::vector<Buffer> owned;
    std::int64_t written = 0;  // tokens of its K/V buffers that may not be zero
  };

  Buffer allocate(std::size_t size) { return device_->allocate(std::max(size, kAlignment)); }
  Segment make_segment(std::size_t k);
  std::byte* pending_rows(std::size_t k, std::int64_t first, std::int64_t tokens);
  void run_chunk(std::size_t k, std::byte* source, std::int64_t chunk, std::int64_t tokens, std::int64_t target);
  float const* head(std::byte* states, std::int64_t tokens);
  void wait_for(std::size_t k);
  void reserve(std::size_t k, std::int64_t rows);

  std::vector<NetworkSpec> const& specs_;
  NetworksInfo const& info_;
  std::unique_ptr<Device> const device_;
  std::vector<std::unique_ptr<Network>> const networks_;
  std::vector<std::size_t> row_bytes_;  // of a segment's input state (0 for the first), and of the head's
  std::size_t vocabulary_;
  std::vector<Segment> segments_;
  std::vector<Buffer> pending_;   // rows before each segment (none before the first), and before the head
  Buffer scratch_, chunk_;        // rows between a run and their pending buffer, after it and before it
  Buffer ids_, ids_host_, logits_, logits_host_;
  std::vector<float> rows_;
  std::int64_t num_logits_ = 0, first_logits_row_ = 0;  // the head's pending rows for `position_logits`
  std::set<std::size_t> queued_;  // segments whose staging memory the queue may still read or write
};

}  // namespace tide

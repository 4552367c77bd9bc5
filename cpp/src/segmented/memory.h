// Holds the buffers of up to `slots` sequences on a device, and runs the networks over them.
//
// `SegmentedBatch` says which slots run a segment. The buffers have a block for each slot: K/V, the hidden states pending
// before each segment but the first, and the exit states that the head reads. The networks read and update them in place, so
// the addresses of a run over adjacent slots depend only on the segment, the slots and the number of tokens. Lengths,
// thresholds and token ids are copied to the device once per run, scores and exits to the host once; `Head` copies logits.
//
// Runs are padded to a power of two, so that a device that records its work has few recordings.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "segmented/device.h"
#include "segmented/head.h"
#include "segmented/network_spec.h"
#include "segmented/run_plan.h"

namespace tide {

// A device, and the networks of `network_specs` on it.
struct DeviceNetworks {
  std::unique_ptr<Device> device;
  std::vector<std::unique_ptr<Network>> networks;  // destroyed before the device
  Buffer embedding = {};                           // their input kEmbedding, if they have it
};

// What a run needs to know of one slot.
struct RunRequest {
  std::size_t slot;
  std::int64_t count;       // tokens that it runs over, at most `info.max_tokens`
  float threshold;          // a score above it exits
  std::int64_t const* ids;  // the new tokens, for segment 0
};

// Rows of the exit states of a slot.
struct ExitStateRows {
  std::size_t slot;
  std::int64_t first, count;
  std::vector<float>* results;  // to which they are appended, [count, exit_size]
};

class DeviceStep;

// May be used by one thread at a time.
class SegmentBuffers {
 public:
  // Allocates buffers for the networks' capacity. `specs` and `info` must outlive it. Throws GenerationError: the device
  // has not enough memory.
  SegmentBuffers(std::vector<NetworkSpec> const& specs, DeviceNetworks device_networks, NetworksInfo const& info,
                 std::size_t slots);
  SegmentBuffers(SegmentBuffers const&) = delete;
  SegmentBuffers& operator=(SegmentBuffers const&) = delete;
  ~SegmentBuffers();

  std::size_t slots() const { return written_.size(); }
  std::size_t segments() const { return segments_.size(); }
  NetworksInfo const& info() const { return info_; }
  Head& head() const { return *head_; }
  Device& device() const { return *device_; }

  // What runs whole steps: with the buffers, because the device keeps recordings of both. Throws GenerationError: the
  // device has not enough memory.
  DeviceStep& device_step();

  // Zeroes what a sequence wrote in a slot, for the next one. Attention multiplies masked K/V by zero, and zero times NaN
  // is NaN: a sequence whose hidden states overflowed must leave nothing behind. Throws GenerationError: the device
  // has failed.
  void clear(std::size_t slot);

  // Runs segment k over all tokens pending before it in some slots, in as many runs as it takes.
  //
  // runs: by ascending slots.
  // lengths: tokens in the segment's K/V cache, of every slot.
  // following: tokens in the next segment's, of every slot; of the last segment not read.
  // verdict: whether scores and exits are read afterwards.
  //
  // Throws GenerationError: the device has not enough memory, or failed.
  void run(std::size_t k, std::vector<RunRequest> const& runs, std::vector<std::int64_t> const& lengths,
           std::vector<std::int64_t> const& following, bool verdict);

  // Where the small inputs and outputs of a run are.
  struct SmallAddresses {
    std::array<std::byte*, 5> inputs;   // lengths, last tokens, pending tokens, thresholds, ids
    std::array<std::byte*, 2> verdict;  // scores, exit flags
  };

  // Queues a run of segment k over slots from `start` on, whose small inputs are on the device.
  void run_network(std::size_t k, std::size_t start, SmallAddresses const& small, RunSize const& size) const;

  // Notes that the tokens of a slot before `length` may be written.
  void note_written(std::size_t slot, std::int64_t length) { written_[slot] = std::max(written_[slot], length); }

  // Whether runs of segments are recorded from now on; those of long prompts never are.
  void record_runs(bool records) { records_runs_ = records; }

  // Waits for all runs. Throws GenerationError: one of them failed.
  void wait();

  // Whether the last token of a slot exits after the segment of the last run, which is over.
  bool exits(std::size_t slot) const;

  // What the router gave for the last token of a slot in the last run, which is over, if its verdict is read.
  float score(std::size_t slot) const;

  // See `Head::run`.
  void logits(std::vector<HeadRow>& rows);

  // Queue the copy of exit states to the host, and append them to their results once something that ran after it is read.
  void queue_exit_states(std::vector<ExitStateRows> rows);
  void take_exit_states();

 private:
  enum Input : std::size_t { kLengths, kLast, kPending, kThreshold, kIds, kNoInput };  // parts of the small inputs
  enum Verdict : std::size_t { kScores, kFlags, kNoVerdict };                          // and of the small outputs

  // The small inputs and outputs of one run.
  struct RunBuffers {
    Block inputs, verdict;
    bool queued = false;  // the queue may not have read `inputs` yet
  };

  // Where one tensor of a segment is: a part of the run's buffers, or memory with so many bytes for each slot.
  struct Place {
    std::byte* address = nullptr;
    std::size_t stride = 0;
    Input input = kNoInput;
    Verdict verdict = kNoVerdict;
  };

  struct Segment {
    NetworkSpec const* spec;
    std::vector<Place> places;  // of its tensors
    std::vector<std::unique_ptr<RunBuffers>> runs;
  };

  // Where the verdict on a slot is.
  struct LastRun {
    RunBuffers const* buffers = nullptr;
    std::size_t index = 0;
  };

  std::byte* allocate(std::size_t size);
  void add_segment(std::size_t k);
  RunBuffers& run_buffers(std::size_t k, std::size_t index);
  void launch(std::size_t k, std::size_t index, Run const& run, RunBuffers& buffers, bool verdict);
  void nothing_queued();

  std::vector<NetworkSpec> const& specs_;
  NetworksInfo const& info_;
  std::unique_ptr<Device> const device_;
  std::vector<std::unique_ptr<Network>> const networks_;
  std::vector<std::int64_t> written_;  // tokens of each slot's buffers that may not be zero
  std::vector<Segment> segments_;
  std::vector<Buffer> owned_;
  Buffer const embedding_;
  Buffer exits_;
  std::unique_ptr<Block> indices_;
  std::unique_ptr<Head> head_;
  Tensor const exit_states_;
  Buffer exit_states_host_;        // on the host
  std::vector<ExitStateRows> queued_;  // copied there one after the other
  std::vector<LastRun> last_run_;  // by slot
  std::unique_ptr<DeviceStep> device_step_;
  bool records_runs_ = true;
};

}  // namespace tide

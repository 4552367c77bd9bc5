// One sequence's memory on a device, and how its networks are run over it.
//
// `SegmentedSequence` says which segment runs over which waiting tokens; a lane knows where they are. Before every
// segment but the first lie the hidden states that wait for it, one row a token, in a buffer that grows; a segment
// reads its rows there and writes the new ones where the next segment will read them. Nothing but token ids, lengths,
// the routers' verdicts and the logits crosses to the host.
//
// Runs are padded to a power of two, so that a device that records its work (a CUDA graph per network and number of
// tokens) has few to record; padding goes behind the last token, in the buffers and in the K/V cache alike, where it is
// overwritten before anything reads it.
#pragma once

#include <algorithm>
#include <memory>
#include <set>
#include <vector>

#include "segmented/device.h"
#include "segmented/network_spec.h"

namespace tide {

// What a router said of the last token of its segment's last run.
struct Verdict {
  float score;
  bool leaves;
};

// A device, and the networks of `network_specs` on it.
struct LaneParts {
  std::unique_ptr<Device> device;
  std::vector<std::unique_ptr<Network>> networks;  // gone before the device
};

// Serves one thread at a time.
class Lane {
 public:
  // Allocates K/V buffers for `info.capacity` tokens, and `waiting_rows` hidden states before every segment. `specs`
  // and `info` must outlive the lane. Throws GenerationError: the device has not enough memory.
  Lane(std::vector<NetworkSpec> const& specs, LaneParts parts, NetworksInfo const& info, std::int64_t waiting_rows);
  Lane(Lane const&) = delete;
  Lane& operator=(Lane const&) = delete;
  ~Lane();

  // Makes the lane as it was when it was made, for another sequence. What lies behind the last token counts for nothing
  // in attention, but as a factor of zero, and zero times NaN is NaN: a sequence that the model made overflow must leave
  // nothing behind. Throws GenerationError: the device has failed.
  void clear();

  // Segment k's router exits above this from its next run on.
  void set_threshold(std::size_t k, float threshold);

  // Segment k over all that waits before it, in as many runs as it takes.
  //
  // ids: the `count` new tokens, for segment 0.
  // count: tokens that wait; length: tokens in the segment's K/V cache.
  // target: the row before segment k + 1 where the first new hidden state goes.
  // keep: how many of the last tokens `rows` shall be asked about, of the last segment.
  //
  // Throws GenerationError: the device has not enough memory, or failed.
  void run(std::size_t k, std::int64_t const* ids, std::int64_t count, std::int64_t length, std::int64_t target,
           std::int64_t keep);

  // Of segment k's last run; waits for it.
  Verdict verdict(std::size_t k);

  // The head on the state the last token left segment k with: float32 [V], the lane's own memory.
  float const* logits(std::size_t k);

  // The head on the tokens the last segment's last run was told to keep: float32 [keep, V], the lane's own memory.
  float const* rows();

 private:
  struct Segment {
    NetworkSpec const* spec;
    std::vector<std::byte*> addresses;  // of its tensors; those of entry and result differ from run to run
    std::size_t entry, result;          // their places
    std::byte* exit_states;
    Buffer control, control_host;  // its small inputs, which cross in one copy
    Buffer verdict, verdict_host;  // and its router's outputs
    std::vector<Buffer> owned;
    std::int64_t written = 0;  // tokens of its K/V buffers that may not be zero
  };

  Buffer allocate(std::size_t size) { return device_->allocate(std::max(size, kAlignment)); }
  Segment made(std::size_t k);
  std::byte* rows_at(std::size_t k, std::int64_t first, std::int64_t tokens);
  void run_chunk(std::size_t k, std::byte* source, std::int64_t chunk, std::int64_t tokens, std::int64_t target);
  float const* head(std::byte* states, std::int64_t tokens);
  void settle(std::size_t k);
  void reserve(std::size_t k, std::int64_t rows);

  std::vector<NetworkSpec> const& specs_;
  NetworksInfo const& info_;
  std::unique_ptr<Device> const device_;
  std::vector<std::unique_ptr<Network>> const networks_;
  std::vector<std::size_t> row_bytes_;  // of what a segment takes (0 of the first), and last of what the head takes
  std::size_t vocabulary_;
  std::vector<Segment> segments_;
  std::vector<Buffer> waiting_;  // rows before each segment (none before the first), and last before the head
  Buffer scratch_, chunk_;       // rows on their way from a run, and to one
  Buffer ids_, ids_host_, logits_, logits_host_;
  std::vector<float> rows_;
  std::int64_t kept_ = 0, kept_from_ = 0;  // the last segment's last so many tokens are in its rows, from this one on
  std::set<std::size_t> queued_;           // segments whose staging memory the queue may not have read yet
};

}  // namespace tide

// Runs the head over rows of the exit states, and copies to the host only the logits from which tokens are chosen.
//
// All logits stay on the device. For positions that need few of them, the networks kBest and kCandidates find these there:
// 8 bytes are copied for the most likely token, 12 bytes each for the kMaxCandidates most likely, 4 bytes each for all V.
//
// Engines may order equal logits as they like. So candidates are used only if the smallest one found is below the last that
// counts: then all that equal the latter were found. Else all logits of that position are copied.
#pragma once

#include <memory>
#include <vector>

#include "segmented/device.h"
#include "segmented/network_spec.h"
#include "tide/state.h"

namespace tide {

// What the head gives of some positions of a sequence: logits [m, V], or candidates [m].
struct PositionLogits {
  std::vector<float> logits;
  std::vector<Candidates> candidates;
};

// A row that the head is to run over.
struct HeadRow {
  std::size_t slot;
  std::int64_t row;         // of the slot's exit states
  std::size_t needed;       // candidates, as `Head::count` returns them
  PositionLogits* results;  // to which its result is appended; null: it is not wanted
};

// The networks after the segments, in the buffers of one device.
class Head {
 public:
  // exits: the exit states of all `slots`. embedding: what a tied head reads. All but these two must outlive it. Throws
  // GenerationError: the device has not enough memory.
  Head(std::vector<NetworkSpec> const& specs, std::vector<std::unique_ptr<Network>> const& networks, Device& device,
       NetworksInfo const& info, Buffer exits, Buffer embedding, std::size_t slots);

  // What is fetched for a position that needs so many candidates: these, or 0 for all logits.
  std::size_t count(std::size_t candidates) const;

  // Appends the results of `rows`, which it reorders; those of a slot are of the same kind and stay in their order.
  // Throws GenerationError: the device failed.
  void run(std::vector<HeadRow>& rows);

  // One run, and what is fetched of it: `fetched` rows of logits, `whole` of which are asked for; the most likely token;
  // the most likely ones.
  struct Plan {
    std::int64_t tokens = 0, fetched = 0, whole = 0;
    bool best = false, top = false;

    std::int64_t fetches() const { return best * 2 + top; }
  };

  // The parts of `run`, for at most `max_logits` rows: plan reorders them; set_rows and upload_rows say which they are,
  // unless who calls writes their indices to `rows` on the device; queue queues the run, and take appends the results that
  // are wanted, when the queue is done.
  Plan plan(std::vector<HeadRow>& rows) const;
  std::int64_t index(HeadRow const& row) const;
  std::byte* rows() const { return rows_.address(0); }
  void set_rows(std::vector<HeadRow> const& rows, Plan const& plan) const;
  void upload_rows(Plan const& plan) const;
  void queue(Plan const& plan) const;
  void take(std::vector<HeadRow> const& rows, Plan const& plan);

 private:
  void run_part(std::vector<HeadRow>& rows);
  Candidates candidates(std::size_t index, std::size_t needed);

  NetworksInfo const& info_;
  std::vector<std::unique_ptr<Network>> const& networks_;
  Device& device_;
  std::size_t const head_;  // its index in `networks_`
  std::size_t const slots_;
  std::vector<Tensor> found_tensors_;  // of the small outputs, by part of `found_`
  std::size_t vocabulary_, most_;
  Buffer exits_, embedding_;
  Block rows_;
  Buffer logits_, logits_host_;
  std::unique_ptr<Block> found_;
};

}  // namespace tide

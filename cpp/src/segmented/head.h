// The head on rows of the exit states, of which no more crosses to the host than tokens are chosen from. All logits stay
// on the device; the networks kBest and kCandidates find the largest there.
//
// Engines may order equal logits as they like. So candidates are used where the least that was found is smaller than the
// last that counts: then all that equal the latter were found. Else all logits of that row are fetched.
#pragma once

#include <memory>
#include <vector>

#include "segmented/device.h"
#include "segmented/network_spec.h"
#include "tide/state.h"

namespace tide {

// The networks after the segments, in the buffers of one device.
class Head {
 public:
  // exits: the exit states. All but `exits` must outlive it. Throws GenerationError: the device has not enough memory.
  Head(std::vector<NetworkSpec> const& specs, std::vector<std::unique_ptr<Network>> const& networks, Device& device,
       NetworksInfo const& info, Buffer exits);

  // What is fetched of a row that needs so many candidates: these, or 0 for all logits.
  std::size_t count(std::size_t candidates) const;

  // Appends the logits of `count` rows from `first_row` on, V each. Throws GenerationError: the device failed.
  void append(std::int64_t first_row, std::int64_t count, std::vector<float>& logits);

  // Appends their candidates, `needed` or more each. Throws GenerationError: the device failed.
  void append(std::int64_t first_row, std::int64_t count, std::size_t needed, std::vector<Candidates>& found);

 private:
  // Runs the head on rows, then the network that many after it on its logits, and brings the last result to the host.
  void run(std::int64_t first_row, std::int64_t rows, std::size_t finder);
  Candidates candidates(std::size_t row, std::size_t needed);

  NetworksInfo const& info_;
  std::vector<std::unique_ptr<Network>> const& networks_;
  Device& device_;
  std::size_t const head_;  // its index in `networks_`
  std::size_t vocabulary_, most_;
  Buffer exits_, rows_, rows_host_, logits_, logits_host_, found_, found_host_;
  std::size_t values_at_;  // in `found_`: the logits, before them the tokens
};

}  // namespace tide

// Walks the segments of a bundle in one step of some sequences: after each, decoding/depth_rule.h decides which of them run
// the next one. Who runs a segment, and where K/V and hidden states lie, is the batch's: pages (paged/batch.cpp) or a
// device's buffers (segmented/batch.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "decoding/depth_rule.h"
#include "request.h"
#include "sequence.h"

namespace tide {

// One sequence in a step.
struct RunningSequence {
  SlotRequest const* request;
  Sequence* sequence;
  std::int64_t total;                 // its tokens, the new ones included
  std::size_t segments_run = 0;       // segments 0 .. segments_run - 1 ran over it
  std::optional<std::size_t> exit{};  // the segment after which it exits; after the walk, whose logits it gets
  float threshold = static_cast<float>(kNeverExit);  // of the segment that runs: a score of its last token above it exits
};

// Runs the segments that the tokens of a step need. Until the step is committed, the sequences' lengths are those of before.
//
// One: a `RunningSequence`. run(k, scheduled): runs segment k over the pending and the new tokens of some sequences, which
// all ran the segment before, and sets `exit` of those that exit after it.
template <typename One, typename Run>
void walk_segments(std::vector<One>& all, std::size_t segments, double compaction_threshold, Run const& run) {
  std::vector<One*> scheduled;
  for (One& one : all) scheduled.push_back(&one);
  for (std::size_t k = 0; k < segments; ++k) {
    if (k > 0) {
      std::vector<One*> active;
      for (One* const one : scheduled) {
        std::int64_t const pending = one->total - one->sequence->lengths[k];
        if (is_active(one->exit.has_value(), pending, one->sequence->rule.max_pending)) active.push_back(one);
      }
      if (active.empty()) break;
      bool const all_ran = scheduled.size() == all.size();
      if (!all_catch_up(active.size(), all.size(), all_ran, compaction_threshold)) scheduled = std::move(active);
    }
    for (One* const one : scheduled) {
      bool const may_exit = k + 1 < segments && !one->exit && !one->request->request.full;
      one->threshold = may_exit ? one->sequence->rule.thresholds[k] : static_cast<float>(kNeverExit);
    }
    run(k, scheduled);
    for (One* const one : scheduled) one->segments_run = k + 1;
  }
  for (One& one : all) {
    bool const deep = one.segments_run == segments;
    if (!one.exit || !at_its_exit(one.request->verifies, deep)) one.exit = segments - 1;
  }
}

}  // namespace tide

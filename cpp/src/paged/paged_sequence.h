// Holds one sequence: its page table, slot for recurrent states, pending hidden states before each segment, and lengths.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "paged/pool.h"
#include "sequence.h"

namespace tide {

class PagedSequence final : public Sequence {
 public:
  // `pool` must outlive it.
  PagedSequence(Manifest const& manifest, PagePool& pool, ExitRule exit_rule);
  ~PagedSequence() override;

  std::vector<float> final_states;    // [n, D'] or [n, H], of the last step, where `states` or `draft_states` ask for them
  std::vector<float> router_scores;   // of the last step, where `scores` asks for them
  std::vector<std::vector<float>> pending;  // hidden states [n, D] before each segment; none before the first
  // A prefix cache has the recurrent states after so many tokens, and waits for those after the next page; kNoLimit: none does.
  std::int64_t kept = kNoLimit;

  void rewind(std::int64_t length) override;

  std::vector<Page> const& pages() const { return pages_; }
  Page place() const { return place_.empty() ? 0 : place_[0]; }  // of its recurrent states, if the model keeps any

  // Whether its recurrent states are those after the first `length` tokens, for a sequence that begins after these.
  bool knows(std::int64_t length) const;

  // Takes pages for `count` more tokens, and copies what the step will write to and others share. Returns the tokens of
  // the sequence with them. Throws GenerationError: no tokens, more than the model's context holds, or no free page; the
  // sequence is then as before.
  std::int64_t reserve(std::size_t count);

  // Ends a step: segments 0 .. segments_run - 1 ran and the sequence has `total` tokens. new_pending: hidden states before the
  // first segment that did not run.
  void ran(std::size_t segments_run, std::int64_t total, std::vector<float> new_pending) noexcept;

  // Begins this empty sequence with `length` tokens, which every segment ran over, in pages that it shares, as is the place of
  // the recurrent states after them; none: the model keeps none.
  void begin(std::vector<Page> const& shared, std::int64_t length, std::optional<Page> states);

  void check(std::vector<Page>& pages, std::vector<Page>& places) const;  // see invariants.cpp

 private:
  void release_after(std::size_t count) noexcept;
  void undo_failed() noexcept;

  PagePool& pool_;
  std::vector<Page> pages_;
  std::vector<Page> place_;            // one, or none
  std::vector<Page> before_;           // that of before a step which it cannot take back, until the step has ended
  std::vector<std::int64_t> kept_from_;  // of each segment: its recurrent states are known after so many tokens and more
};

}  // namespace tide

// Steps several sequences together by hand, for callers that choose tokens themselves. `Engine::generate` of a list and
// `Scheduler` call `step` in a loop.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tide/runtime.h"

namespace tide {

class Batch;  // internal

// One sequence's part of a batch step.
struct SlotStep {
  std::size_t slot = 0;
  std::vector<std::int64_t> ids;  // new tokens, at least one
  // Number of last positions, 1 or more, to return logits for if the last segment runs; the result is then that of full
  // depth, even if the token could have exited. None: the result is that of the token's exit.
  std::optional<std::int64_t> logits_to_keep;
  bool full = false;  // run every segment, and let no token exit
};

// Created by `Engine::start_batch`. May be used by one thread at a time.
class BatchState {
 public:
  BatchState(BatchState&&) noexcept;
  BatchState& operator=(BatchState&&) noexcept;
  ~BatchState();

  std::size_t free_slots() const;

  // Adds an empty sequence and returns its slot. The arguments are those of `Engine::start`. Throws GenerationError: no
  // slot is free, or memory ran out.
  std::size_t join(std::vector<double> const& thresholds, std::int64_t max_pending,
                   std::optional<std::string> const& adapter = std::nullopt);

  void leave(std::size_t slot);  // frees the slot of a sequence

  // Runs the new tokens of some sequences, by ascending slots. The results are in that order, without scores, and valid
  // until the next step. Throws GenerationError: there are no ids, an id is outside the vocabulary, the tokens exceed the
  // model's context or the buffers, memory ran out, or the engine failed; the sequences are then unchanged.
  std::vector<StepResult> step(std::vector<SlotStep> const& steps);

  // Removes all tokens of a sequence after the first `length`. Throws as `State::rewind`.
  void rewind(std::size_t slot, std::int64_t length);

  std::vector<std::int64_t> lengths(std::size_t slot) const;   // as `State`

 private:
  friend class Engine;
  BatchState(std::shared_ptr<Backend> backend, double compaction_threshold, std::size_t slots);

  void check(std::size_t slot) const;

  std::shared_ptr<Backend> backend_;
  std::unique_ptr<Batch> batch_;
  std::vector<bool> taken_;  // by slot
};

}  // namespace tide

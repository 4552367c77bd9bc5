// Several sequences that are stepped together, for callers that choose tokens themselves; `Engine::generate` of a list and
// a `Scheduler` are this in a loop.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tide/runtime.h"

namespace tide {

class Batch;  // internal

// The part of one sequence in a step of a batch.
struct SlotStep {
  std::size_t slot = 0;
  std::vector<std::int64_t> ids;  // new tokens, at least one
  // Number of last positions to return logits for where the last segment runs, at least 1; the result is then that of full
  // depth, also where the token could have exited and only caught up with others. None: the sequence has its own exit,
  // whatever runs.
  std::optional<std::int64_t> logits_to_keep;
  bool full = false;  // runs every segment, and lets nothing exit
};

// Created by `Engine::start_batch`. May be used by one thread at a time.
class BatchState {
 public:
  BatchState(BatchState&&) noexcept;
  BatchState& operator=(BatchState&&) noexcept;
  ~BatchState();

  std::size_t free_slots() const;

  // Adds an empty sequence and returns its slot. The arguments are those of `Engine::start`. Throws GenerationError: there
  // is no free slot, or no memory.
  std::size_t join(std::vector<double> const& thresholds, std::int64_t max_pending);

  void leave(std::size_t slot);  // frees the slot of a sequence

  // Runs the new tokens of some sequences, by ascending slots; the results are in that order, without scores, and valid
  // until the next step. Throws GenerationError: no ids or an id outside the vocabulary, more tokens than the model's
  // context or the buffers hold, no memory, or the engine failed; the sequences are then as before the step.
  std::vector<StepResult> step(std::vector<SlotStep> const& steps);

  // Removes all tokens of a sequence after the first `length`. Throws as `State::rewind`.
  void rewind(std::size_t slot, std::int64_t length);

  std::vector<std::int64_t> lengths(std::size_t slot) const;   // as `State`
  std::vector<std::int64_t> computed(std::size_t slot) const;

 private:
  friend class Engine;
  BatchState(std::shared_ptr<Backend> backend, double compaction_threshold, std::size_t slots);

  void check(std::size_t slot) const;

  std::shared_ptr<Backend> backend_;
  std::unique_ptr<Batch> batch_;
  std::vector<bool> taken_;  // by slot
};

}  // namespace tide

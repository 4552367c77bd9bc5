// Steps one sequence by hand, for callers that choose tokens themselves. A `State` holds its K/V and the pending tokens
// before each segment; `Engine::generate` calls `step` in a loop.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace tide {

class Backend;  // internal
class Batch;    // internal

constexpr double kNeverExit = 2.0;  // a threshold that no score exceeds: its checkpoint never exits
constexpr std::int64_t kNoLimit = std::int64_t{1} << 62;  // as `max_pending`: more tokens than can ever be pending

// The tokens with the largest logits of one position, with all that tie with one of them.
struct Candidates {
  std::vector<std::int64_t> tokens;  // ascending
  std::vector<float> logits;
};

// The result of one step. The memory belongs to the state and is valid until its next step.
struct StepResult {
  float const* logits = nullptr;  // [rows, vocabulary], of the last `rows` positions
  std::size_t rows = 0;           // one, unless more were requested and the last segment ran
  std::size_t vocabulary = 0;
  std::int64_t exit_layer = 0;    // layers before the last position's logits; the model's depth without an exit
  std::int64_t segments_run = 0;  // segments 0 .. segments_run - 1 ran in this step
  // [checkpoints], of a `State`; NaN where the router decided nothing: not reached, off, or after an exit.
  float const* scores = nullptr;
  // [state_rows, state_width], internal: the final hidden states of all tokens that the last segment ran over.
  float const* states = nullptr;
  std::size_t state_rows = 0, state_width = 0;
  float const* exit_state = nullptr;  // [state_width], internal: the head's input at the last position
  // [rows], internal: in place of logits where `Engine::generate` needs no others.
  Candidates const* candidates = nullptr;

  float const* row(std::size_t number) const { return logits + number * vocabulary; }
  float const* last() const { return row(rows - 1); }
};

// Created by `Engine::start`. May be used by one thread at a time; any number of states share one engine. A method that
// throws leaves the state unchanged.
class State {
 public:
  State(State&&) noexcept;
  State& operator=(State&&) noexcept;
  ~State();

  // Adds one or more tokens, each in [0, vocab_size).
  //
  // logits_to_keep: number of last positions, 1 or more, to return logits for if the last segment runs; at most the
  //     tokens that it runs over.
  // full: run every segment and let no token exit, whatever the thresholds.
  //
  // Throws GenerationError: there are no ids, an id is outside the vocabulary, the tokens exceed the model's context,
  // memory for their K/V ran out, or the engine failed.
  StepResult step(std::int64_t const* ids, std::size_t count, std::int64_t logits_to_keep = 1, bool full = false);
  StepResult step(std::vector<std::int64_t> const& ids, std::int64_t logits_to_keep = 1, bool full = false);

  // Removes all tokens after the first `length`. Throws GenerationError: the sequence is shorter, or its recurrent states at
  // `length` are not kept: they are at a step's last 32 tokens, and before a step of at most 32.
  void rewind(std::int64_t length);

  // Sets other thresholds, one per checkpoint, from the next step on; pending tokens stay pending. Throws
  // GenerationError: their number is wrong, or one is NaN.
  void set_thresholds(std::vector<double> const& thresholds);

  std::int64_t length() const;                        // tokens of the sequence
  std::vector<std::int64_t> const& lengths() const;   // tokens in each segment's K/V; never increases with depth
  std::vector<std::int64_t> pending() const;          // pending tokens before segment 1, 2, ...

 private:
  friend class Engine;
  State(std::shared_ptr<Backend> backend, std::vector<double> const& thresholds, std::int64_t max_pending,
        std::int64_t adapter);

  std::shared_ptr<Backend> backend_;
  std::unique_ptr<Batch> batch_;  // of this sequence, in slot 0
};

}  // namespace tide

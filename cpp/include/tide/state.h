// The state of one sequence: its K/V, the pending tokens before each segment, and the step that adds tokens.
// For callers that choose tokens themselves; `Engine::generate` is this in a loop.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace tide {

class Backend;   // internal
class Sequence;  // internal

constexpr double kNeverExit = 2.0;  // a threshold that no score exceeds: its checkpoint never exits
constexpr std::int64_t kNoLimit = std::int64_t{1} << 62;  // as `max_pending`: more tokens than can ever be pending

// The tokens with the largest logits of one position, and all that have a logit equal to one of theirs.
struct Candidates {
  std::vector<std::int64_t> tokens;  // ascending
  std::vector<float> logits;
};

// The outcome of one step. The memory belongs to the state and is valid until its next step.
struct StepResult {
  float const* logits = nullptr;  // [rows, vocabulary], of the last `rows` positions
  std::size_t rows = 0;           // one, unless more were requested and the last segment ran
  std::size_t vocabulary = 0;
  std::int64_t exit_layer = 0;    // layers the last position's logits went through; the model's depth without an exit
  std::int64_t segments_run = 0;  // segments 0 .. segments_run - 1 ran in this step
  float const* scores = nullptr;  // [checkpoints], NaN where the router was not reached or is off
  // [state_rows, state_width], the final states of all tokens that the last segment ran over, where they were asked for.
  float const* states = nullptr;
  std::size_t state_rows = 0, state_width = 0;
  float const* exit_state = nullptr;  // [state_width], what the head read of the last position, where that was asked for
  // [rows] in place of logits, where `Engine::generate` needs no others; never of a step that you make yourself.
  Candidates const* candidates = nullptr;

  float const* row(std::size_t number) const { return logits + number * vocabulary; }
  float const* last() const { return row(rows - 1); }
};

// Created by `Engine::start`. May be used by one thread at a time; any number of states share one engine. After an
// exception the state is what it was before the call.
class State {
 public:
  State(State&&) noexcept;
  State& operator=(State&&) noexcept;
  ~State();

  // Adds tokens: at least one, each in [0, vocab_size).
  //
  // logits_to_keep: number of last positions, at least 1, to return logits for where the last segment runs; never more
  //     than the tokens that the last segment runs over.
  // full: runs every segment and lets nothing exit, whatever the thresholds. In a bundle that propagates K/V the first
  //     step and every step of several tokens always run this way.
  //
  // Throws GenerationError: no ids or an id outside the vocabulary, more tokens than the model's context holds, not
  // enough memory for their K/V, or the engine failed.
  StepResult step(std::int64_t const* ids, std::size_t count, std::int64_t logits_to_keep = 1, bool full = false);
  StepResult step(std::vector<std::int64_t> const& ids, std::int64_t logits_to_keep = 1, bool full = false);

  // Removes all tokens after the first `length`. Throws GenerationError: the sequence is shorter, its K/V are propagated,
  // or its recurrent states are not known there: of a step's tokens they are at the last 32, and before them if these are
  // all.
  void rewind(std::int64_t length);

  // Replaces the thresholds, one per checkpoint, from the next step on; pending tokens stay pending. Throws
  // GenerationError: a wrong number of thresholds, or NaN.
  void set_thresholds(std::vector<double> const& thresholds);

  std::int64_t length() const;                        // tokens of the sequence
  std::vector<std::int64_t> const& lengths() const;   // tokens in each segment's K/V; never rises with depth
  std::vector<std::int64_t> computed() const;         // tokens that each segment has run over
  std::vector<std::int64_t> pending() const;          // pending tokens before segment 1, 2, ...

  // Internal: lets steps give the largest `count` logits alone, where the engine can; 0: all. And no scores.
  void use_candidates(std::size_t count);

  // Internal: how many tokens a rewind will not remove, but those of the next step.
  void settle(std::int64_t tokens);

  // Internal: lets steps give final states.
  void use_states(bool states);

 private:
  friend class Engine;
  State(std::shared_ptr<Backend> backend, std::vector<double> const& thresholds, std::int64_t max_pending);

  std::shared_ptr<Backend> backend_;
  std::unique_ptr<Sequence> sequence_;
};

}  // namespace tide

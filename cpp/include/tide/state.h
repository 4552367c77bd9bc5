// One sequence in flight: its K/V buffers, the hidden states that wait between segments, and the step that moves it on.
// For those who pick tokens themselves; `Engine::generate` is this in a loop.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace tide {

class Session;   // of the library alone
class Sequence;  // likewise

constexpr double kOff = 2.0;  // a threshold that no score is above: its checkpoint never exits
constexpr std::int64_t kNoLimit = std::int64_t{1} << 62;  // more tokens than can ever wait
constexpr std::int64_t kRoom = 128;  // tokens of K/V buffer beyond the prompt before the first growth

// What one step says about its last token. The memory is the state's own and changes with its next step.
struct StepResult {
  float const* logits = nullptr;  // [rows, vocabulary], of the last `rows` positions
  std::size_t rows = 0;           // one, unless more were asked for and the last segment ran
  std::size_t vocabulary = 0;
  std::int64_t exit_layer = 0;    // layers the last logits went through; the model's depth when it did not exit
  std::int64_t segments_run = 0;  // segments 0 .. this-1 ran in this step
  float const* scores = nullptr;  // [checkpoints], NaN where the router was not reached

  float const* row(std::size_t number) const { return logits + number * vocabulary; }
  float const* last() const { return row(rows - 1); }
};

// Made by `Engine::start`. Serves one thread at a time; any number of states share one engine. After an exception the
// sequence is what it was before the call.
class State {
 public:
  State(State&&) noexcept;
  State& operator=(State&&) noexcept;
  ~State();

  // Runs new tokens, at least one, each in [0, vocab_size).
  //
  // logits_to_keep: how many of the last positions get logits where the last segment runs, at least 1; no more than
  //     the tokens it runs over come.
  // full: run every segment and let nothing exit, whatever the thresholds. Where K/V are propagated the first step is
  //     such, and every step of several tokens.
  //
  // Throws GenerationError: no ids or one outside the vocabulary, more tokens than the model's context holds, no
  // memory for their K/V, or what runs the bundle failed.
  StepResult step(std::int64_t const* ids, std::size_t count, std::int64_t logits_to_keep = 1, bool full = false);
  StepResult step(std::vector<std::int64_t> const& ids, std::int64_t logits_to_keep = 1, bool full = false);

  // Forgets all tokens but the first `length`, as if they had never been stepped. Throws GenerationError if the
  // sequence has fewer, or its K/V are propagated.
  void rewind(std::int64_t length);

  // Uses other thresholds, one per checkpoint, from the next step on; what waits goes on waiting. Throws
  // GenerationError: a wrong number of them, or NaN.
  void set_thresholds(std::vector<double> const& thresholds);

  std::int64_t length() const;                        // tokens of the sequence so far
  std::vector<std::int64_t> const& lengths() const;   // tokens in each segment's K/V buffers; never rises with depth
  std::vector<std::int64_t> const& computed() const;  // tokens that each segment has run over
  std::vector<std::int64_t> waiting() const;          // tokens waiting before segment 1, 2, ...
  std::int64_t capacity() const;                      // tokens the K/V buffers hold before they grow

 private:
  friend class Engine;
  State(std::shared_ptr<Session> session, std::vector<double> const& thresholds, std::int64_t max_pending,
        std::int64_t room);

  std::shared_ptr<Session> session_;
  std::unique_ptr<Sequence> sequence_;
};

}  // namespace tide

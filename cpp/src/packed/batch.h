// The state machine of a step over several sequences: after every segment, which of them go on. The rule, and what
// `compaction_threshold` is for, is that of tide_export/runtime/decoding/depth_rule.py.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "packed/row.h"
#include "packed/segment.h"
#include "decoding/decoder.h"

namespace tide {

// What one sequence wants of a step.
struct Wanted {
  std::size_t place;
  StepRequest const& request;
  // Whether it gets the logits of full depth if the last segment runs, also where it could have left and only came
  // along. A sequence that does not verify leaves at its own exit whatever runs.
  bool verifies;
};

// Sequences at `sessions->rows` places, and the buffers of their steps. Serves one thread at a time.
class Batch {
 public:
  // thresholds: one per checkpoint, as `resolve_thresholds` gives them. max_pending: a sequence is run through a
  // segment when more of its tokens than this would wait before it. compaction_threshold: when a smaller share of the
  // sequences in a step than this needs a segment, only those run it; else all that wait before it do.
  Batch(std::shared_ptr<BatchSessions> sessions, Manifest const& manifest, std::vector<double> const& thresholds,
        std::int64_t max_pending, double compaction_threshold);
  virtual ~Batch() = default;

  std::size_t free() const { return free_.size(); }  // places left
  std::size_t join();                                // the place of a new, empty sequence
  void leave(std::size_t place);                     // frees a place and the buffers of its sequence
  Row& row(std::size_t place) { return *rows_[place]; }

  // Runs the new tokens of some sequences, by ascending places; results in the same order, without scores, and valid
  // until the next step. Throws GenerationError: no ids, more tokens than the model's context holds, no memory for
  // their K/V, or ONNX Runtime failed. The sequences are as they were before the step.
  virtual std::vector<StepResult> step(std::vector<Wanted> const& wanted);

 protected:
  // One sequence in a step.
  struct Going {
    Wanted const* wanted;
    Row* row;
    std::int64_t total;                 // tokens it has with the new ones
    std::int64_t count;                 // tokens it brought to the last segment that ran over it
    std::size_t start = 0;              // where they begin among those of that run
    std::size_t ran = 0;                // segments 0 .. this-1 ran over it, also those it only caught up in
    std::optional<std::size_t> left{};  // the first segment it could leave behind
    std::vector<float> states{};        // what the head takes of it, [m, D']
    std::vector<float> door{};          // what waits before the segment that did not run, [n, D]
  };
  using Some = std::vector<Going*>;

  // Makes room for the new tokens and gathers their ids.
  std::vector<Going> take(std::vector<Wanted> const& wanted);

  // Runs segment k over `some`, whose `count` are up to date; `entry`, [N, D], is not read by the first.
  void run(std::size_t k, Some const& some, std::vector<std::int64_t> const& asked, float* entry);

  // What the head makes of the states that each left with.
  std::vector<StepResult> answers(std::vector<Going> const& all);

  // The hidden states that segment k made of a sequence in its last run, [count, D].
  float const* made(std::size_t k, Going const& one) const;
  std::size_t floats(std::int64_t tokens) const { return static_cast<std::size_t>(tokens) * hidden_size_; }

  std::shared_ptr<BatchSessions> const sessions_;
  Manifest const& manifest_;
  std::vector<std::int64_t> const depths_;
  std::vector<float> const thresholds_;
  std::size_t const hidden_size_;
  std::vector<std::unique_ptr<SegmentRun>> segments_;
  std::vector<float> entry_;  // of a segment, where it is not just what the one before made
  Ort::MemoryInfo const memory_ = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);

 private:
  void bind(std::size_t place, Row& row);
  Some still_needing(Some const& needed, std::size_t k) const;
  float* enter(std::size_t k, Some const& some, bool all_that_came);
  void note_exits(std::size_t k, Some const& some, std::vector<std::int64_t> const& asked);
  void commit(std::vector<Going>& all);

  std::int64_t const max_pending_;
  double const compaction_threshold_;
  Row nobody_;
  std::vector<std::unique_ptr<Row>> rows_;  // by place
  std::vector<std::size_t> free_;           // places; the next is the last
  std::vector<std::int64_t> ids_;
  std::vector<float> exit_states_;
  Ort::Value logits_{nullptr};
};

}  // namespace tide

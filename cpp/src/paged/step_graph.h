// Runs the step graph for one sequence: the graph itself decides which token exits and which segments run. A step binds only
// tensors that differ from the step before; pages are written in place, and a skipped segment costs nothing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "onnxruntime/session.h"
#include "paged/run.h"
#include "paged/paged_sequence.h"

namespace tide {

// The bindings of one thread. May step any sequence of its engine.
class StepGraph {
 public:
  // `session`, `pool` and `adapters` must outlive it.
  StepGraph(Ort::Session& session, Manifest const& manifest, PagePool const& pool, Adapters const& adapters);

  // Adds the tokens of a step to a sequence. The result is valid until the next step. Throws as `Sequence::step`; the
  // sequence is then as before.
  StepResult step(PagedSequence& sequence, std::int64_t const* ids, std::size_t count, std::int64_t logits_to_keep,
                  bool full);

 private:
  // The input of the states before a segment.
  struct Pending {
    std::string name;
    float const* states = nullptr;  // that are bound
    std::size_t size = 0;
  };

  template <typename T>
  void bind_input(char const* name, T* data, std::vector<std::int64_t> const& shape) {
    binding_.BindInput(name, view(memory_, data, shape));
  }
  void bind_pending(PagedSequence const& sequence);
  void bind_ids(std::int64_t const* ids, std::size_t count);
  void set_thresholds(PagedSequence const& sequence, std::int64_t total, bool full);
  void select_logits(std::int64_t count);

  Ort::Session& session_;
  Manifest const& manifest_;
  Ort::MemoryInfo const memory_ = Ort::MemoryInfo::cpu();
  Ort::RunOptions const run_options_;
  Ort::IoBinding binding_;
  PageBindings pages_;
  std::vector<std::int64_t> const depths_;

  std::vector<Pending> pending_;  // before segment 1, 2, ...
  float no_state_ = 0;
  std::vector<float> exit_thresholds_, skip_thresholds_, scores_, logits_;  // bound
  bool may_skip_ = true;            // whether a score can exceed a bound skip threshold
  bool no_pending_output_ = false;  // whether the last pending output had no tokens

  std::vector<std::int64_t> ids_, logits_positions_;
  std::int64_t one_id_ = 0;
  bool one_id_bound_ = false;
  std::int64_t num_logits_ = 0;  // rows of logits that are bound
  Ort::Value rows_{nullptr};     // the last step's logits, where they are not in `logits_`
  Ort::Value states_{nullptr};   // the last step's final states, once a sequence asked for them
  bool states_bound_ = false;
};

}  // namespace tide

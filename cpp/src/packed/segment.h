// One segment's session with the bindings of one batch: runs any of the sequences, each over its own new tokens.
//
// K/V buffers are bound as input and output, slot by slot: keys and values are written in place, and a slot that is not
// run costs a skipped branch. A slot without a sequence is bound to a padding sequence with buffers of one token.
#pragma once

#include <cstdint>
#include <vector>

#include "packed/networks.h"
#include "packed/sequence.h"

namespace tide {

// The share of one sequence in a run.
struct Part {
  std::size_t slot;
  std::int64_t count;   // its tokens in this run
  std::int64_t total;   // its tokens in the K/V cache after the run
  std::int64_t logits;  // number of its last positions whose exit states are returned, 1 .. count
  float threshold;      // for its score, which is of one position; not read by the last segment
};

class SegmentRun {
 public:
  // Binds all slots to `padding`.
  SegmentRun(BatchSessions& sessions, Manifest const& manifest, std::size_t k, PackedSequence& padding);

  // Binds the buffers of the sequence in this slot.
  void bind(std::size_t slot, PackedSequence& sequence);

  // Runs some sequences, by ascending slots, over token ids [N] or hidden states [N, D] of all of them, one sequence
  // after the other. Throws GenerationError: ONNX Runtime failed.
  void run(std::vector<Part> const& parts, std::int64_t* ids);
  void run(std::vector<Part> const& parts, float* states);

  // The last run's outputs. Where a threshold is above 1 the exit state is not computed, and the score NaN.
  std::vector<float> exit_states;  // [sum of logits, D'], the head's input for tokens that exit after this segment
  std::vector<float> scores;       // [sum of logits], the router's; empty for the last segment
  std::vector<float> hidden;       // [N, D], the new hidden states; empty for the last segment

 private:
  std::int64_t prepare(std::vector<Part> const& parts);
  void allocate(std::int64_t tokens, std::int64_t logits);
  void run_on(char const* input, Ort::Value const& value);

  template <typename T>
  void bind_input(char const* name, std::vector<T>& values, std::vector<std::int64_t> const& shape);
  void bind_output(char const* name, std::vector<float>& values, std::vector<std::int64_t> const& shape);

  Ort::Session& session_;
  std::size_t const k_;
  Layers const layers_;
  std::vector<std::size_t> const kv_read_;  // layers whose K/V it reads
  bool const last_;
  std::int64_t const hidden_size_, exit_size_;
  Ort::MemoryInfo const memory_ = Ort::MemoryInfo::cpu();
  Ort::RunOptions const run_options_;
  Ort::IoBinding binding_;
  std::int64_t tokens_ = -1, logits_ = -1;  // that the buffers are bound for
  std::vector<std::int64_t> last_tokens_, positions_, slot_tokens_;
  std::vector<float> thresholds_;
  std::vector<std::int32_t> slot_lengths_;
};

}  // namespace tide

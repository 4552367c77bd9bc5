// Runs a batch network, with the bindings of one batch, for any of its sequences, each over its new tokens. Keys and values
// are written into the sequences' pages, in place.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "paged/adapters.h"
#include "paged/networks.h"
#include "paged/paged_sequence.h"

namespace tide {

// The share of one sequence in a run.
struct Part {
  PagedSequence const* sequence;
  std::int64_t count;   // its tokens in this run
  std::int64_t total;   // its tokens in the K/V cache after the run
  std::int64_t logits;  // number of its last positions whose exit states are returned, 1 .. count
  float threshold;      // for its score, which is of one position; not read by the last segment
};

// The inputs that say which tokens of which sequences a run is over, and its bindings to the pool.
class SequenceInputs {
 public:
  // Binds the pages of the layers that are read and written, and these recurrent states, to the memory of `pool`;
  // adapters: those that the network reads, or null.
  SequenceInputs(Ort::IoBinding& binding, Manifest const& manifest, PagePool const& pool,
                 std::vector<std::size_t> const& read, std::vector<std::size_t> const& written,
                 std::vector<std::size_t> const& states, Adapters const* adapters);

  // Adds the next sequence: its last `count` tokens of `total`, the last `logits` of which give outputs.
  void add(PagedSequence const& sequence, std::int64_t count, std::int64_t total, std::int64_t logits);

  void bind();   // after the last sequence; in a debug build, checks that no page would be written twice
  void clear();  // before the first one

  std::int64_t tokens() const { return static_cast<std::int64_t>(positions_.size()); }
  std::int64_t logits() const { return static_cast<std::int64_t>(last_tokens_.size()); }

 private:
  template <typename T>
  void bind_input(char const* name, std::vector<T>& values, std::vector<std::int64_t> const& shape) {
    binding_.BindInput(name, view(memory_, values.data(), shape));
  }

  Ort::IoBinding& binding_;
  Ort::MemoryInfo const memory_ = Ort::MemoryInfo::cpu();
  std::vector<PagedSequence const*> sequences_;
  std::vector<std::int64_t> positions_, starts_, last_tokens_, lengths_;
  std::vector<Page> table_;
  bool const has_states_, has_adapters_;
  std::vector<std::int64_t> places_;  // of recurrent states, and tokens that are settled
  std::vector<std::int64_t> adapters_;
  std::size_t bound_ = 0, width_ = 0;               // sequences and pages of each that are bound
  std::int64_t bound_tokens_ = 0, bound_logits_ = 0;
  bool whole_ = false;                              // whether `bind` has ended since `clear`
};

class NetworkRun {
 public:
  // The network of segment k.
  NetworkRun(Networks& networks, Manifest const& manifest, PagePool const& pool, Adapters const& adapters,
             std::size_t k);

  // Runs some sequences over token ids [N] or hidden states [N, D] of all of them, one sequence after the other. Throws
  // GenerationError: ONNX Runtime failed.
  void run(std::vector<Part> const& parts, std::int64_t* ids);
  void run(std::vector<Part> const& parts, float* entry);

  // The last run's outputs. Where a threshold is above 1 the exit state is not computed, and the
  // score NaN.
  std::vector<float> exit_states;  // [sum of logits, D'], the head's input for tokens that exit after this segment
  std::vector<float> scores;       // [sum of logits], the router's; empty for the last segment
  std::vector<float> hidden;       // [N, D], the new hidden states; empty for the last segment
  std::vector<float> draft_states;  // [N, H], what the drafter reads, if the last segment gives it; else empty

 private:
  void prepare(std::vector<Part> const& parts);
  void allocate();
  void run_on(char const* input, Ort::Value const& value);
  void bind_output(char const* name, std::vector<float>& values, std::vector<std::int64_t> const& shape);

  Ort::Session& session_;
  std::string const name_;
  bool const has_next_;  // gives the hidden states of the next segment
  std::int64_t const hidden_size_, exit_size_, draft_size_;  // the last is 0: it gives none
  Ort::MemoryInfo const memory_ = Ort::MemoryInfo::cpu();
  Ort::RunOptions const run_options_;
  Ort::IoBinding binding_;
  SequenceInputs inputs_;
  std::int64_t tokens_ = -1, logits_ = -1;  // that the outputs are bound for
  std::vector<float> thresholds_;
};

}  // namespace tide

// One segment's session with the bindings of one batch: runs any of the rows, each over its own new tokens.
//
// K/V buffers are bound as input and output at once, row by row: keys and values are written in place, and a row that
// is not run costs an idle branch. A place in the batch without a sequence is bound to buffers of one token.
#pragma once

#include <cstdint>
#include <vector>

#include "packed/networks.h"
#include "packed/row.h"

namespace tide {

// What one sequence brings to a run.
struct Part {
  std::size_t place;   // in the batch
  std::int64_t count;  // its tokens in this run
  std::int64_t total;  // those it will then have in the K/V cache
  std::int64_t asked;  // of how many of its last positions the states are wanted, 1 .. count
};

class SegmentRun {
 public:
  // `nobody` stands in for sequences that are not there.
  SegmentRun(BatchSessions& sessions, Manifest const& manifest, std::size_t k, Row& nobody);

  // The sequence at this place is `row`, or its buffers are new.
  void bind_row(std::size_t place, Row& row);

  // Runs some sequences, by ascending places, over token ids [N] or hidden states [N, D] of all of them, one behind the
  // other; they must stay where they are until it returns. Throws GenerationError: ONNX Runtime failed.
  void run(std::vector<Part> const& parts, std::int64_t* ids);
  void run(std::vector<Part> const& parts, float* hidden);

  // Of the last run, [sum of asked, D']: what the head takes should tokens leave behind this segment.
  std::vector<float> states;
  // [sum of asked], the router's; empty behind the last segment.
  std::vector<float> scores;
  // [N, D], the new hidden states; empty behind the last segment.
  std::vector<float> hidden;

 private:
  std::int64_t prepare(std::vector<Part> const& parts);
  void allocate(std::int64_t tokens, std::int64_t asked);
  void finish(char const* entry, Ort::Value const& value);

  template <typename T>
  void bind_input(char const* name, std::vector<T>& values, std::vector<std::int64_t> const& shape);
  void bind_output(char const* name, std::vector<float>& values, std::vector<std::int64_t> const& shape);

  Ort::Session& session_;
  std::size_t const k_;
  Layers const layers_;
  bool const last_;
  std::int64_t const hidden_size_, exit_size_;
  Ort::MemoryInfo const memory_ = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);
  Ort::RunOptions const run_options_;
  Ort::IoBinding binding_;
  std::int64_t tokens_ = -1, asked_ = -1;  // that the bindings are set up for
  std::vector<std::int64_t> last_tokens_, positions_, slot_tokens_;
  std::vector<std::int32_t> slot_lengths_;
};

}  // namespace tide

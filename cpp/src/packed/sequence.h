// One sequence of a batch: its K/V buffers, pending states before each segment, and lengths. It has no bindings, so
// that it may take any slot of a batch.
#pragma once

#include <cstdint>
#include <vector>

#include "decoding/decoder.h"
#include "lone_sequence.h"
#include "onnxruntime/kv_buffer.h"

namespace tide {

// When the tokens of a sequence exit, and how many of them may be pending before a segment must run over it.
struct ExitRule {
  std::vector<float> thresholds;  // one per checkpoint, as returned by `resolve_thresholds`
  std::int64_t max_pending = 0;
};

class PackedSequence {
 public:
  explicit PackedSequence(Manifest const& manifest, ExitRule rule = {});

  ExitRule const rule;

  std::vector<std::int64_t> lengths;  // tokens in each segment's K/V, shallowest first; never rising with depth
  std::vector<std::int64_t> skipped;  // of these, tokens that skipped the segment: their K/V are propagated
  std::vector<std::vector<float>> pending;  // states [n, D] before each segment; none before the first

  std::int64_t length() const { return lengths[0]; }
  std::vector<std::int64_t> computed() const;  // tokens that each segment has run over

  // Removes all tokens after the first `length`. Throws GenerationError: the sequence is shorter, or its K/V are
  // propagated.
  void rewind(std::int64_t length);

  // Makes room for `count` more tokens. Throws GenerationError: no tokens, more than the model's context holds, or not
  // enough memory for them; the buffers are then as before.
  void reserve(std::size_t count);

  // Begins this empty sequence with `length` tokens as if every segment had run over them. blocks: their K/V, copied by
  // `KvBuffers::read`, `size` tokens each; the last may hold more. Throws as `reserve`; the sequence is then as before.
  void write_kv(std::vector<std::vector<char> const*> const& blocks, std::int64_t size, std::int64_t length);

  // Steps this sequence on `lone`, which has its K/V buffers. Throws as `Sequence::step`; it is then as before.
  StepResult step_alone(LoneSequence& lone, StepRequest const& request);

  KvBuffers kv;
  bool lone_is_current = false;  // whether the sequence of `step_alone` has come as far as this one

 private:
  Manifest const& manifest_;
};

}  // namespace tide

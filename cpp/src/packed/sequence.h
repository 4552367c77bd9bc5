// One sequence of a batch: its K/V buffers, pending states before each segment, and lengths. It has no bindings, so
// that it may take any slot of a batch.
#pragma once

#include <cstdint>
#include <vector>

#include "sequence.h"
#include "lone_sequence.h"
#include "onnxruntime/kv_buffer.h"

namespace tide {

class PackedSequence final : public SequenceState {
 public:
  explicit PackedSequence(Manifest const& manifest, ExitRule rule = {});

  ExitRule const rule;

  std::vector<std::int64_t> skipped;  // tokens of `lengths` that skipped the segment: their K/V are propagated
  std::vector<std::vector<float>> pending;  // states [n, D] before each segment; none before the first

  std::vector<std::int64_t> computed() const override;
  void rewind(std::int64_t length) override;

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
};

}  // namespace tide

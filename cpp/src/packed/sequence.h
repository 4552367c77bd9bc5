// One sequence of a batch: its K/V buffers, pending states before each segment, and lengths. It has no bindings, so
// that it may take any slot of a batch.
#pragma once

#include <cstdint>
#include <vector>

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

  // Makes room for `count` more tokens; whether the buffers changed. Throws GenerationError: no tokens, more than the
  // model's context holds, or not enough memory for them; the buffers are then as before.
  bool reserve(std::size_t count);

  // Moves K/V to buffers of `capacity` tokens, all or none.
  void allocate(std::int64_t capacity);

  std::int64_t capacity() const { return capacity_; }  // tokens that the buffers hold

  // kind: an index into `names::kKinds`.
  KvBuffer& buffer(std::size_t layer, std::size_t kind) { return buffers_[2 * layer + kind]; }

 private:
  Manifest const& manifest_;
  std::vector<std::size_t> segment_of_;  // by layer
  std::vector<KvBuffer> buffers_;        // keys and values of each layer, interleaved; empty of one that has none
  std::int64_t capacity_ = 0;
};

}  // namespace tide

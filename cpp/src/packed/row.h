// One sequence of a batch: its K/V buffers, the hidden states waiting before each segment, and how far each has come.
// As a `State`, but nothing is bound here: a row may take any place of a batch and leave it again.
#pragma once

#include <cstdint>
#include <vector>

#include "onnxruntime/kv_buffer.h"

namespace tide {

class Row {
 public:
  explicit Row(Manifest const& manifest);

  std::vector<std::int64_t> lengths;  // tokens in each segment's K/V, shallowest first; never rising with depth
  std::vector<std::int64_t> skipped;  // how many of them skipped it and got K/V of the state they left with
  std::vector<std::vector<float>> waiting;  // hidden states [n, D] before each segment; never any before the first

  std::int64_t length() const { return lengths[0]; }
  std::vector<std::int64_t> computed() const;  // tokens that each segment has run over

  // Forgets all tokens but the first `length`, behind a step that ran every segment over it: nothing waits then. Not
  // where K/V are propagated.
  void rewind(std::int64_t length);

  // Makes room for `count` more tokens. Throws GenerationError: no tokens, more than the model's context holds, or no
  // memory for them.
  void reserve(std::size_t count);

  // Moves K/V to buffers of `capacity` tokens.
  void allocate(std::int64_t capacity);

  bool bound = false;  // whether the batch knows the buffers; they are others once they have grown, even half-way

  // `kind` is a place in `kKinds`.
  KvBuffer& buffer(std::size_t layer, std::size_t kind) { return buffers_[2 * layer + kind]; }

 private:
  Manifest const& manifest_;
  std::vector<std::size_t> segment_of_;  // by layer
  std::vector<KvBuffer> buffers_;        // keys and values of each layer in turn
  std::int64_t capacity_ = 0;
};

}  // namespace tide

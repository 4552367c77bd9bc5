// Keys and values of one sequence, in memory that ONNX Runtime reads and writes in place.
#pragma once

#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "tide/manifest.h"

namespace tide {

// Those of one layer.
class KvBuffer {
 public:
  // Creates a buffer without memory.
  explicit KvBuffer(ModelInfo::KvShape shape) : heads_(shape.heads), head_dim_(shape.head_dim) {}

  // Returns a buffer for `capacity` tokens with a copy of the first `used`. Throws GenerationError: not enough memory.
  KvBuffer grown(std::int64_t capacity, std::int64_t used) const;

  // Copies the keys or values of `count` tokens from this position on, [heads, count, head_dim]; returns their end. Of a
  // buffer without memory: none.
  float* read(std::int64_t position, std::int64_t count, float* values) const;

  // Writes the keys or values of `count` tokens from this position on; those of each head, [count, head_dim], are
  // `stride` floats apart. Returns the values after them; of a buffer without memory: `values`.
  float const* write(std::int64_t position, std::int64_t count, float const* values, std::size_t stride);
  float const* write(std::int64_t position, std::int64_t count, float const* values) {
    return write(position, count, values, static_cast<std::size_t>(count * head_dim_));
  }

  // float32 [1, heads, capacity, head_dim], on this memory.
  Ort::Value tensor(Ort::MemoryInfo const& memory) const;

 private:
  struct Free {
    void operator()(void* memory) const;
  };
  std::int64_t heads_, head_dim_;
  std::int64_t capacity_ = 0;
  std::unique_ptr<float, Free> data_;
};

// Those of all layers with K/V of their own.
class KvBuffers {
 public:
  // Creates buffers without memory. room: tokens to hold beyond those of the first `reserve`.
  KvBuffers(Manifest const& manifest, std::int64_t room);

  // Makes room for `total` tokens: twice what there is, at first `room` more than needed; never more than the model's
  // context. lengths: tokens in each segment's buffers. Throws GenerationError: not enough memory.
  void reserve(std::int64_t total, std::vector<std::int64_t> const& lengths);

  // Moves K/V to buffers of `capacity` tokens, all or none. Throws GenerationError: not enough memory.
  void allocate(std::int64_t capacity, std::vector<std::int64_t> const& lengths);

  std::int64_t capacity() const { return capacity_; }  // tokens that they hold

  // Copies the K/V of the tokens from `start` to `stop`, which the buffers of every layer hold.
  std::vector<float> read(std::int64_t start, std::int64_t stop) const;

  // Writes what `read` returned for as many tokens, from `start` on; there is room for them.
  void write(std::int64_t start, std::vector<float> const& values);

  // kind: an index into `names::kKinds`.
  KvBuffer& buffer(std::size_t layer, std::size_t kind) { return buffers_[2 * layer + kind]; }

 private:
  Manifest const& manifest_;
  std::int64_t const room_;
  std::vector<KvBuffer> buffers_;  // keys and values of each layer, interleaved; empty of one that has none
  std::int64_t capacity_ = 0;
};

}  // namespace tide

// Keys and values of one sequence, in memory that ONNX Runtime reads and writes in place.
#pragma once

#include "onnxruntime/api.h"

#include <cstdint>
#include <memory>
#include <vector>

#include "tide/manifest.h"

namespace tide {

// Those of one layer.
class KvBuffer {
 public:
  // Creates a buffer without memory, for tokens of this shape (`Manifest::kv_shape`) and type.
  KvBuffer(std::vector<std::int64_t> const& shape, Ort::ElementType type);

  // Returns a buffer for `capacity` tokens with a copy of the first `used`. Throws GenerationError: not enough memory.
  KvBuffer grown(std::int64_t capacity, std::int64_t used) const;

  // Copies the bytes of the keys or values of `count` tokens from this position on, [heads, count, width]; returns
  // their end. Of a buffer without memory: none.
  char* read(std::int64_t position, std::int64_t count, char* values) const;

  // Writes the keys or values of `count` tokens from this position on; those of each head, [count, width], are `stride`
  // bytes apart. Returns the values after them; of a buffer without memory: `values`.
  char const* write(std::int64_t position, std::int64_t count, char const* values, std::size_t stride);
  char const* write(std::int64_t position, std::int64_t count, char const* values) {
    return write(position, count, values, static_cast<std::size_t>(count) * row_bytes());
  }

  // [1, heads, capacity, width], on this memory.
  Ort::Value tensor(Ort::MemoryInfo const& memory) const;

 private:
  struct Free {
    void operator()(void* memory) const;
  };
  std::size_t row_bytes() const;  // of one head's key or value of a token
  char* row(std::int64_t head, std::int64_t position) const;

  Ort::ElementType type_;
  std::int64_t heads_, width_;
  std::int64_t capacity_ = 0;
  std::unique_ptr<char, Free> data_;
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
  std::vector<char> read(std::int64_t start, std::int64_t stop) const;

  // Writes what `read` returned for as many tokens, from `start` on; there is room for them.
  void write(std::int64_t start, std::vector<char> const& values);

  // kind: an index into `names::kKinds`.
  KvBuffer& buffer(std::size_t layer, std::size_t kind) { return buffers_[2 * layer + kind]; }

 private:
  Manifest const& manifest_;
  std::int64_t const room_;
  std::vector<KvBuffer> buffers_;  // keys and values of each layer, interleaved; empty of one that has none
  std::int64_t capacity_ = 0;
};

}  // namespace tide

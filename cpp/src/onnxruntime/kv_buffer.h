// Keys or values of one layer of one sequence, in memory that ONNX Runtime reads and writes in place.
#pragma once

#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <memory>

#include "tide/manifest.h"

namespace tide {

class KvBuffer {
 public:
  // Creates a buffer without memory.
  explicit KvBuffer(ModelInfo::KvShape shape) : heads_(shape.heads), head_dim_(shape.head_dim) {}

  // Returns a buffer for `capacity` tokens with a copy of the first `used`. Throws GenerationError: not enough memory.
  KvBuffer grown(std::int64_t capacity, std::int64_t used) const;

  // Writes the keys or values of the token at this position; those of each head, [head_dim], are `stride` floats apart.
  void write(std::int64_t position, float const* values, std::size_t stride);

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

// The capacity that buffers grow to so that `needed` tokens fit: twice the old one, at first `room` more than needed;
// never more than the model's context.
std::int64_t grown_capacity(Manifest const& manifest, std::int64_t capacity, std::int64_t needed, std::int64_t room);

}  // namespace tide

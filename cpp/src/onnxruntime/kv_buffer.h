// Keys or values of one layer of one sequence, in memory that ONNX Runtime reads and writes in place.
#pragma once

#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "tide/manifest.h"

namespace tide {

// A tensor that is this memory: nothing is copied, and whoever binds it keeps the memory.
template <typename T>
Ort::Value view(Ort::MemoryInfo const& place, T* data, std::vector<std::int64_t> const& shape) {
  std::size_t count = 1;
  for (std::int64_t const size : shape) count *= static_cast<std::size_t>(size);
  return Ort::Value::CreateTensor<T>(place, data, count, shape.data(), shape.size());
}

class KvBuffer {
 public:
  explicit KvBuffer(ModelInfo::KvShape shape) : heads_(shape.heads), head_dim_(shape.head_dim) {}

  // One with room for `capacity` tokens and a copy of the first `used`. Throws GenerationError: no memory.
  KvBuffer grown(std::int64_t capacity, std::int64_t used) const;

  // Puts one token's keys or values, of each head [head_dim] at `stride` floats from the last head's, where that of
  // token number `token` belongs.
  void write(std::int64_t token, float const* values, std::size_t stride);

  // float32 [1, heads, capacity, head_dim].
  Ort::Value tensor(Ort::MemoryInfo const& place) const;

 private:
  struct Free {
    void operator()(void* memory) const;
  };
  std::int64_t heads_, head_dim_;
  std::int64_t capacity_ = 0;
  std::unique_ptr<float, Free> data_;
};

// Tokens that buffers of `capacity` grow to when `needed` must fit: twice as many, at first `room` more than needed;
// but never more than the model's context.
std::int64_t grown_capacity(Manifest const& manifest, std::int64_t capacity, std::int64_t needed, std::int64_t room);

}  // namespace tide

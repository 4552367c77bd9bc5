#include "onnxruntime/kv_buffer.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "names.h"
#include "onnxruntime/session.h"
#include "tide/errors.h"

namespace tide {

void KvBuffer::Free::operator()(void* memory) const { std::free(memory); }

KvBuffer KvBuffer::grown(std::int64_t capacity, std::int64_t used) const {
  auto const row = static_cast<std::size_t>(head_dim_);
  auto const heads = static_cast<std::size_t>(heads_), tokens = static_cast<std::size_t>(capacity);
  KvBuffer larger({heads_, head_dim_});
  // calloc, because the kernel provides zeroed pages only when they are written.
  bool const countable = tokens <= std::numeric_limits<std::ptrdiff_t>::max() / sizeof(float) / heads / row;
  if (countable) larger.data_.reset(static_cast<float*>(std::calloc(heads * tokens * row, sizeof(float))));
  if (!larger.data_) {
    throw GenerationError("not enough memory for the K/V cache of " + std::to_string(capacity) + " tokens");
  }
  larger.capacity_ = capacity;
  std::size_t const size = static_cast<std::size_t>(used) * row, stride = static_cast<std::size_t>(capacity_) * row;
  for (std::size_t head = 0; head < heads && size > 0; ++head) {
    std::memcpy(larger.data_.get() + head * tokens * row, data_.get() + head * stride, size * sizeof(float));
  }
  return larger;
}

float* KvBuffer::read(std::int64_t position, std::int64_t count, float* values) const {
  if (!data_) return values;
  for (std::int64_t head = 0; head < heads_; ++head) {
    values = std::copy_n(data_.get() + (head * capacity_ + position) * head_dim_, count * head_dim_, values);
  }
  return values;
}

float const* KvBuffer::write(std::int64_t position, std::int64_t count, float const* values, std::size_t stride) {
  if (!data_) return values;
  for (std::int64_t head = 0; head < heads_; ++head, values += stride) {
    std::copy_n(values, count * head_dim_, data_.get() + (head * capacity_ + position) * head_dim_);
  }
  return values;
}

Ort::Value KvBuffer::tensor(Ort::MemoryInfo const& memory) const {
  return view(memory, data_.get(), {1, heads_, capacity_, head_dim_});
}

KvBuffers::KvBuffers(Manifest const& manifest, std::int64_t room) : manifest_(manifest), room_(room) {
  for (ModelInfo::KvShape const shape : manifest.model.kv_shapes) {
    for (std::size_t kind = 0; kind < std::size(names::kKinds); ++kind) buffers_.emplace_back(shape);
  }
}

void KvBuffers::reserve(std::int64_t total, std::vector<std::int64_t> const& lengths) {
  if (total <= capacity_) return;
  std::int64_t const larger = std::max(2 * capacity_, total + (capacity_ == 0 ? room_ : 0));
  allocate(std::min(larger, manifest_.model.context_length.value_or(larger)), lengths);
}

void KvBuffers::allocate(std::int64_t capacity, std::vector<std::int64_t> const& lengths) {
  std::vector<std::pair<KvBuffer*, KvBuffer>> replaced;  // and by what
  std::vector<std::int64_t> const depths = manifest_.depths();
  std::size_t segment = 0;
  for (std::size_t const layer : manifest_.model.kv_read(0, manifest_.model.kv_shapes.size())) {
    while (static_cast<std::int64_t>(layer) >= depths[segment]) ++segment;
    for (std::size_t kind = 0; kind < std::size(names::kKinds); ++kind) {
      KvBuffer& held = buffer(layer, kind);
      replaced.emplace_back(&held, held.grown(capacity, lengths[segment]));
    }
  }
  for (auto& [held, larger] : replaced) *held = std::move(larger);
  capacity_ = capacity;
}

std::vector<float> KvBuffers::read(std::int64_t start, std::int64_t stop) const {
  std::vector<float> values(static_cast<std::size_t>((stop - start) * manifest_.model.kv_token_size()));
  float* end = values.data();
  for (KvBuffer const& held : buffers_) end = held.read(start, stop - start, end);
  return values;
}

void KvBuffers::write(std::int64_t start, std::vector<float> const& values) {
  std::int64_t const count = static_cast<std::int64_t>(values.size()) / manifest_.model.kv_token_size();
  float const* next = values.data();
  for (KvBuffer& held : buffers_) next = held.write(start, count, next);
}

}  // namespace tide

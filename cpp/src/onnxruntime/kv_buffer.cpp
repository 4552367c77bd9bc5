#include "onnxruntime/kv_buffer.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <utility>

#include "names.h"
#include "onnxruntime/session.h"
#include "tide/errors.h"

namespace tide {

void KvBuffer::Free::operator()(void* memory) const { std::free(memory); }

KvBuffer::KvBuffer(std::vector<std::int64_t> const& shape, Ort::ElementType type)
    : type_(type), heads_(shape[1]), width_(shape[3]) {}

std::size_t KvBuffer::row_bytes() const {
  return static_cast<std::size_t>(width_) * (type_ == Ort::abi::kInt8 ? 1 : sizeof(float));
}

KvBuffer KvBuffer::grown(std::int64_t capacity, std::int64_t used) const {
  std::size_t const row = row_bytes();
  auto const heads = static_cast<std::size_t>(heads_), tokens = static_cast<std::size_t>(capacity);
  KvBuffer larger({1, heads_, capacity, width_}, type_);
  // calloc, because the kernel provides zeroed pages only when they are written.
  bool const countable = tokens <= std::numeric_limits<std::ptrdiff_t>::max() / heads / row;
  if (countable) larger.data_.reset(static_cast<char*>(std::calloc(heads * tokens, row)));
  if (!larger.data_) {
    throw GenerationError("not enough memory for the K/V cache of " + std::to_string(capacity) + " tokens");
  }
  larger.capacity_ = capacity;
  std::size_t const size = static_cast<std::size_t>(used) * row, stride = static_cast<std::size_t>(capacity_) * row;
  for (std::size_t head = 0; head < heads && size > 0; ++head) {
    std::memcpy(larger.data_.get() + head * tokens * row, data_.get() + head * stride, size);
  }
  return larger;
}

char* KvBuffer::read(std::int64_t position, std::int64_t count, char* values) const {
  if (!data_) return values;
  for (std::int64_t head = 0; head < heads_; ++head) {
    values = std::copy_n(row(head, position), static_cast<std::size_t>(count) * row_bytes(), values);
  }
  return values;
}

char const* KvBuffer::write(std::int64_t position, std::int64_t count, char const* values, std::size_t stride) {
  if (!data_) return values;
  for (std::int64_t head = 0; head < heads_; ++head, values += stride) {
    std::copy_n(values, static_cast<std::size_t>(count) * row_bytes(), row(head, position));
  }
  return values;
}

char* KvBuffer::row(std::int64_t head, std::int64_t position) const {
  return data_.get() + static_cast<std::size_t>(head * capacity_ + position) * row_bytes();
}

Ort::Value KvBuffer::tensor(Ort::MemoryInfo const& memory) const {
  std::int64_t const shape[] = {1, heads_, capacity_, width_};
  std::size_t const bytes = static_cast<std::size_t>(heads_ * capacity_) * row_bytes();
  return Ort::Value::on(memory, data_.get(), bytes, shape, std::size(shape), type_);
}

KvBuffers::KvBuffers(Manifest const& manifest, std::int64_t room) : manifest_(manifest), room_(room) {
  for (std::size_t layer = 0; layer < manifest.model.kv_shapes.size(); ++layer) {
    for (std::size_t kind = 0; kind < std::size(names::kKinds); ++kind) {
      buffers_.emplace_back(manifest.kv_shape(layer, 0), element_type(manifest.kv_cache));
    }
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

std::vector<char> KvBuffers::read(std::int64_t start, std::int64_t stop) const {
  std::vector<char> values(static_cast<std::size_t>((stop - start) * manifest_.kv_token_bytes()));
  char* end = values.data();
  for (KvBuffer const& held : buffers_) end = held.read(start, stop - start, end);
  return values;
}

void KvBuffers::write(std::int64_t start, std::vector<char> const& values) {
  std::int64_t const count = static_cast<std::int64_t>(values.size()) / manifest_.kv_token_bytes();
  char const* next = values.data();
  for (KvBuffer& held : buffers_) next = held.write(start, count, next);
}

}  // namespace tide

#include "paged/pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>

#include "memory_limit.h"
#include "names.h"
#include "onnxruntime/session.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr std::size_t kArrayAlignment = 1 << 16;  // of arrays: a multiple of the system's pages

std::size_t aligned(std::size_t bytes) { return (bytes + kArrayAlignment - 1) / kArrayAlignment * kArrayAlignment; }

}  // namespace

MemoryPool::MemoryPool(std::vector<std::size_t> const& bytes, Words words) : words_(std::move(words)) {
  for (std::size_t const of_array : bytes) {
    arrays_.push_back({0, of_array});
    item_bytes_ += of_array;
  }
  constexpr std::size_t kMost = std::numeric_limits<Page>::max();
  std::size_t items = item_bytes_ == 0 ? kMost : std::min(memory_limit() / item_bytes_, kMost);
  bool limited = false;
  for (; items > 0 && !reserve(items); items /= 2) limited = true;
  if (limited && items > 1) {  // the rest of what the system allows is for other memory
    ::munmap(memory_, size_);
    items /= 2;
    if (!reserve(items)) items = 0;
  }
  if (items == 0) {
    throw GenerationError("not enough memory for " + words_.whole + " of " + std::to_string(words_.count) + " " + words_.units);
  }
  items_ = static_cast<std::int64_t>(items);
#ifdef MADV_NOHUGEPAGE
  ::madvise(memory_, size_, MADV_NOHUGEPAGE);  // one would be filled for each layer, however few tokens there are
#endif
}

MemoryPool::~MemoryPool() {
  assert(free_.size() == references_.size());  // what was taken was given back
  if (size_ > 0) ::munmap(memory_, size_);
}

// Reserves memory for so many items, one array after the other. Returns whether the system allows it.
bool MemoryPool::reserve(std::size_t items) {
  size_ = 0;
  for (Array& array : arrays_) {
    array.offset = size_;
    size_ += aligned(items * array.bytes);
  }
  if (size_ == 0) return true;
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const memory = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, kFlags, -1, 0);
  if (memory == MAP_FAILED) return false;
  memory_ = static_cast<char*>(memory);
  return true;
}

void MemoryPool::take(std::size_t count, std::vector<Page>& items) {
  std::lock_guard<std::mutex> const lock(mutex_);
  std::size_t const fresh = count - std::min(count, free_.size());
  if (references_.size() + fresh > static_cast<std::size_t>(items_)) {
    throw GenerationError("not enough memory for " + words_.whole + ": it holds " + std::to_string(words_.count * items_) +
                          " " + words_.units + " of all sequences");
  }
  items.reserve(items.size() + count);
  references_.reserve(references_.size() + fresh);
  free_.reserve(references_.size() + fresh);  // `release` must not fail
  for (std::size_t i = 0; i < count; ++i) {
    if (free_.empty()) {
      free_.push_back(static_cast<Page>(references_.size()));
      references_.push_back(0);
    }
    items.push_back(free_.back());
    references_[static_cast<std::size_t>(free_.back())] = 1;
    free_.pop_back();
  }
}

void MemoryPool::share(Page item) {
  std::lock_guard<std::mutex> const lock(mutex_);
  ++references_[static_cast<std::size_t>(item)];
}

void MemoryPool::release(Page item) noexcept {
  std::lock_guard<std::mutex> const lock(mutex_);
  if (--references_[static_cast<std::size_t>(item)] > 0) return;
  free_.push_back(item);
  if (free_.size() == references_.size()) return_memory();
}

bool MemoryPool::is_shared(Page item) const {
  std::lock_guard<std::mutex> const lock(mutex_);
  return references_[static_cast<std::size_t>(item)] > 1;
}

void MemoryPool::make_own(Page& item) {
  if (!is_shared(item)) return;
  std::vector<Page> own;
  take(1, own);
  for (Array const& array : arrays_) {
    char* const first = memory_ + array.offset;
    std::memcpy(first + static_cast<std::size_t>(own[0]) * array.bytes,
                first + static_cast<std::size_t>(item) * array.bytes, array.bytes);
  }
  release(item);
  item = own[0];
}

Ort::Value MemoryPool::tensor_of(std::size_t array, std::vector<std::int64_t> shape, std::string const& type) const {
  shape.insert(shape.begin(), items_);
  std::size_t const bytes = static_cast<std::size_t>(items_) * arrays_[array].bytes;
  return Ort::Value::on(cpu_, memory_ + arrays_[array].offset, bytes, shape.data(), shape.size(), element_type(type));
}

// Gives the memory of all items, which are free, back to the system.
void MemoryPool::return_memory() noexcept {
  for (Array const& array : arrays_) {
    std::size_t const used = aligned(references_.size() * array.bytes);
    if (used > 0) ::madvise(memory_ + array.offset, used, MADV_DONTNEED);
  }
  references_.clear();
  free_.clear();
}

namespace {

std::vector<std::size_t> bytes_of_pages(Manifest const& manifest) {
  std::vector<std::size_t> bytes(2 * manifest.model.kv_shapes.size());  // keys and values of each layer, interleaved
  for (std::size_t const layer : manifest.model.kv_read(0, manifest.model.kv_shapes.size())) {
    std::vector<std::int64_t> const shape = manifest.kv_shape(layer, kPageTokens);
    std::size_t const numbers = static_cast<std::size_t>(shape[1] * shape[2] * shape[3]);
    bytes[2 * layer] = bytes[2 * layer + 1] = numbers * (manifest.int8_kv() ? 1 : sizeof(float));
  }
  return bytes;
}

std::vector<std::size_t> bytes_of_states(Manifest const& manifest) {
  std::vector<std::size_t> bytes;
  for (ModelInfo::State const& state : manifest.model.states) {
    bytes.push_back(sizeof(float));
    for (std::int64_t const size : state.shape) bytes.back() *= static_cast<std::size_t>(size);
  }
  return bytes;
}

}  // namespace

StatePool::StatePool(Manifest const& manifest)
    : MemoryPool(bytes_of_states(manifest), {"the recurrent states", 1, "places"}), manifest_(manifest) {}

Ort::Value StatePool::tensor(std::size_t number) const {
  return tensor_of(number, manifest_.model.states[number].shape, "float32");
}

PagePool::PagePool(Manifest const& manifest)
    : MemoryPool(bytes_of_pages(manifest), {"the K/V cache", kPageTokens, "tokens"}),
      states(manifest),
      manifest_(manifest) {}

Ort::Value PagePool::tensor(std::size_t layer, std::size_t kind) const {
  std::vector<std::int64_t> shape = manifest_.kv_shape(layer, kPageTokens);
  shape.erase(shape.begin());
  return tensor_of(2 * layer + kind, std::move(shape), manifest_.kv_cache);
}

}  // namespace tide

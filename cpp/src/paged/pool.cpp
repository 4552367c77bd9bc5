#include "paged/pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>

#include "names.h"
#include "onnxruntime/session.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr std::size_t kArrayAlignment = 1 << 16;  // of arrays: a multiple of the system's pages

std::size_t aligned(std::size_t bytes) { return (bytes + kArrayAlignment - 1) / kArrayAlignment * kArrayAlignment; }

std::size_t machine_memory() {
  return static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(::sysconf(_SC_PAGE_SIZE));
}

}  // namespace

PagePool::PagePool(Manifest const& manifest) : manifest_(manifest), arrays_(2 * manifest.model.kv_shapes.size()) {
  for (std::size_t const layer : manifest.model.kv_read(0, manifest.model.kv_shapes.size())) {
    std::vector<std::int64_t> const shape = manifest.kv_shape(layer, kPageTokens);
    std::size_t const numbers = static_cast<std::size_t>(shape[1] * shape[2] * shape[3]);
    arrays_[2 * layer].bytes = arrays_[2 * layer + 1].bytes = numbers * (manifest.int8_kv() ? 1 : sizeof(float));
  }
  auto const page_bytes = static_cast<std::size_t>(kPageTokens * manifest.kv_token_bytes());
  std::size_t pages = std::min<std::size_t>(machine_memory() / page_bytes, std::numeric_limits<Page>::max());
  bool limited = false;
  for (; pages > 0 && !reserve(pages); pages /= 2) limited = true;
  if (limited && pages > 1) {  // the rest of what the system allows is for other memory
    ::munmap(memory_, size_);
    pages /= 2;
    if (!reserve(pages)) pages = 0;
  }
  if (pages == 0) throw GenerationError("not enough memory for the K/V cache of " + std::to_string(kPageTokens) + " tokens");
  pages_ = static_cast<std::int64_t>(pages);
#ifdef MADV_NOHUGEPAGE
  ::madvise(memory_, size_, MADV_NOHUGEPAGE);  // one would be filled for each layer, however few tokens there are
#endif
}

PagePool::~PagePool() { ::munmap(memory_, size_); }

// Reserves memory for so many pages, one array after the other. Returns whether the system allows it.
bool PagePool::reserve(std::size_t pages) {
  size_ = 0;
  for (Array& array : arrays_) {
    array.offset = size_;
    size_ += aligned(pages * array.bytes);
  }
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const memory = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, kFlags, -1, 0);
  if (memory == MAP_FAILED) return false;
  memory_ = static_cast<char*>(memory);
  return true;
}

void PagePool::take(std::size_t count, std::vector<Page>& pages) {
  std::lock_guard<std::mutex> const lock(mutex_);
  std::size_t const fresh = count - std::min(count, free_.size());
  if (references_.size() + fresh > static_cast<std::size_t>(pages_)) {
    throw GenerationError("not enough memory for the K/V cache: it holds " + std::to_string(max_tokens()) +
                          " tokens of all sequences");
  }
  pages.reserve(pages.size() + count);
  references_.reserve(references_.size() + fresh);
  free_.reserve(references_.size() + fresh);  // `release` must not fail
  for (std::size_t i = 0; i < count; ++i) {
    if (free_.empty()) {
      free_.push_back(static_cast<Page>(references_.size()));
      references_.push_back(0);
    }
    pages.push_back(free_.back());
    references_[static_cast<std::size_t>(free_.back())] = 1;
    free_.pop_back();
  }
}

void PagePool::share(Page page) {
  std::lock_guard<std::mutex> const lock(mutex_);
  ++references_[static_cast<std::size_t>(page)];
}

void PagePool::release(Page page) noexcept {
  std::lock_guard<std::mutex> const lock(mutex_);
  if (--references_[static_cast<std::size_t>(page)] > 0) return;
  free_.push_back(page);
  if (free_.size() == references_.size()) return_memory();
}

bool PagePool::is_shared(Page page) const {
  std::lock_guard<std::mutex> const lock(mutex_);
  return references_[static_cast<std::size_t>(page)] > 1;
}

void PagePool::make_own(Page& page) {
  if (!is_shared(page)) return;
  std::vector<Page> own;
  take(1, own);
  for (Array const& array : arrays_) {
    char* const first = memory_ + array.offset;
    std::memcpy(first + static_cast<std::size_t>(own[0]) * array.bytes,
                first + static_cast<std::size_t>(page) * array.bytes, array.bytes);
  }
  release(page);
  page = own[0];
}

Ort::Value PagePool::tensor(std::size_t layer, std::size_t kind) const {
  std::vector<std::int64_t> shape = manifest_.kv_shape(layer, kPageTokens);
  shape[0] = pages_;
  Array const& array = arrays_[2 * layer + kind];
  std::size_t const bytes = static_cast<std::size_t>(pages_) * array.bytes;
  return Ort::Value::on(cpu_, memory_ + array.offset, bytes, shape.data(), shape.size(),
                        element_type(manifest_.kv_cache));
}

// Gives the memory of all pages, which are free, back to the system.
void PagePool::return_memory() noexcept {
  for (Array const& array : arrays_) {
    std::size_t const used = aligned(references_.size() * array.bytes);
    if (used > 0) ::madvise(memory_ + array.offset, used, MADV_DONTNEED);
  }
  references_.clear();
  free_.clear();
}

}  // namespace tide

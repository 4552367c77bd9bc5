// The K/V cache of an engine: pages of kPageTokens tokens, of all layers, that sequences and prefix caches take and give
// back. One reservation of address space holds them; the system provides memory for a page when it is first written, so
// that the cache grows without a copy.
#pragma once

#include "onnxruntime/api.h"

#include <cstdint>
#include <mutex>
#include <vector>

#include "tide/manifest.h"

namespace tide {

constexpr std::int64_t kPageTokens = 16;

using Page = std::int32_t;  // the number of a page, as page tables hold it

// The pages that `tokens` tokens take.
inline std::size_t pages_of(std::int64_t tokens) {
  return static_cast<std::size_t>((tokens + kPageTokens - 1) / kPageTokens);
}

// May be used by several threads at once.
class PagePool {
 public:
  // Reserves as many pages as the machine's memory holds, or fewer where the system reserves no more at once. `manifest`
  // must outlive it. Throws GenerationError: not one can be reserved.
  explicit PagePool(Manifest const& manifest);
  ~PagePool();
  PagePool(PagePool const&) = delete;
  PagePool& operator=(PagePool const&) = delete;

  std::int64_t max_tokens() const { return pages_ * kPageTokens; }  // tokens of all sequences that it holds at most

  // Appends `count` pages with one reference each, all or none. Throws GenerationError: there are not so many.
  void take(std::size_t count, std::vector<Page>& pages);

  void share(Page page);             // adds a reference
  void release(Page page) noexcept;  // removes one; a page without any is free
  bool is_shared(Page page) const;   // whether there are several

  // Replaces a shared page by a copy of it with one reference. Throws GenerationError: there is no free page.
  void make_own(Page& page);

  // [pages, kv_heads, kPageTokens, width] of a layer, on the pool's memory. kind: an index into `names::kKinds`.
  Ort::Value tensor(std::size_t layer, std::size_t kind) const;

 private:
  // The keys or values of one layer: `bytes` a page, from `offset` on. No bytes: the layer reads another one's.
  struct Array {
    std::size_t offset = 0, bytes = 0;
  };
  bool reserve(std::size_t pages);
  void return_memory() noexcept;

  Manifest const& manifest_;
  Ort::MemoryInfo const cpu_ = Ort::MemoryInfo::cpu();
  std::vector<Array> arrays_;  // keys and values of each layer, interleaved
  std::int64_t pages_ = 0;
  std::size_t size_ = 0;  // bytes that are reserved
  char* memory_ = nullptr;

  mutable std::mutex mutex_;  // of what follows
  std::vector<std::uint32_t> references_;  // of the pages that were ever taken
  std::vector<Page> free_;                 // of them; the last is taken first: its memory was used last
};

}  // namespace tide

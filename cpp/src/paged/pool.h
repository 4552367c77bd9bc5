// Allocates memory for sequences and prefix caches: pages of K/V, and slots for recurrent states. One reservation of address
// space holds all of one kind; the system provides memory for a page or slot when it is first written, so nothing is moved.
#pragma once

#include "onnxruntime/api.h"

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "tide/manifest.h"

namespace tide {

constexpr std::int64_t kPageTokens = 16;

using Page = std::int32_t;  // the number of a page, as page tables hold it; or of a place

// The pages that `tokens` tokens take.
inline std::size_t pages_of(std::int64_t tokens) {
  return static_cast<std::size_t>((tokens + kPageTokens - 1) / kPageTokens);
}

// One array of the tensors of each layer, or of each state: an item is a page's part of it, or a sequence's. May be used by
// several threads at once.
class MemoryPool {
 public:
  // What messages say: it is for `whole`, of which an item is for `count` of `units`.
  struct Words {
    std::string whole;
    std::int64_t count;
    std::string units;
  };

  // Reserves as many items as the machine's memory holds, or fewer where the system reserves no more at once. bytes: of an
  // item, in each array; 0 where it has none. Throws GenerationError: not one can be reserved.
  MemoryPool(std::vector<std::size_t> const& bytes, Words words);
  ~MemoryPool();
  MemoryPool(MemoryPool const&) = delete;
  MemoryPool& operator=(MemoryPool const&) = delete;

  std::int64_t size() const { return items_; }
  std::int64_t item_bytes() const { return static_cast<std::int64_t>(item_bytes_); }

  // Appends `count` items with one reference each, all or none. Throws GenerationError: there are not so many.
  void take(std::size_t count, std::vector<Page>& items);

  void share(Page item);             // adds a reference
  void release(Page item) noexcept;  // removes one; an item without any is free
  bool is_shared(Page item) const;   // whether there are several

  // Replaces a shared item by a copy of it with one reference. Throws GenerationError: there is no free one.
  void make_own(Page& item);

  void check(std::vector<Page> const& held) const;  // see invariants.cpp

 protected:
  // The items of an array as a tensor; shape: of an item.
  Ort::Value tensor_of(std::size_t array, std::vector<std::int64_t> shape, std::string const& type) const;

 private:
  struct Array {
    std::size_t offset = 0, bytes = 0;
  };
  bool reserve(std::size_t items);
  void return_memory() noexcept;

  Words const words_;
  Ort::MemoryInfo const cpu_ = Ort::MemoryInfo::cpu();
  std::vector<Array> arrays_;
  std::int64_t items_ = 0;
  std::size_t item_bytes_ = 0;
  std::size_t size_ = 0;  // bytes that are reserved
  char* memory_ = nullptr;

  mutable std::mutex mutex_;  // of what follows
  std::vector<std::uint32_t> references_;  // of the items that were ever taken
  std::vector<Page> free_;                 // of them; the last is taken first: its memory was used last
};

// The recurrent states of an engine's sequences. What is in a place that is taken is another sequence's: a run over a
// sequence's first tokens does not read it. Without states there is no memory.
class StatePool final : public MemoryPool {
 public:
  explicit StatePool(Manifest const& manifest);  // which must outlive it

  Ort::Value tensor(std::size_t number) const;  // [places, ..], of state `number` of the manifest

 private:
  Manifest const& manifest_;
};

// The K/V cache of an engine, and the states of its sequences.
class PagePool final : public MemoryPool {
 public:
  explicit PagePool(Manifest const& manifest);  // which must outlive it

  std::int64_t max_tokens() const { return size() * kPageTokens; }  // tokens of all sequences that it holds at most

  // [pages, kv_heads, kPageTokens, width] of a layer. kind: an index into `names::kKinds`.
  Ort::Value tensor(std::size_t layer, std::size_t kind) const;

  StatePool states;

 private:
  Manifest const& manifest_;
};

}  // namespace tide

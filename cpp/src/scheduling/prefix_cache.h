// Keeps the K/V of texts for requests that begin with the same tokens, up to a limit, dropping the least recently used first.
// Pages are shared; nothing is copied.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "paged/batch.h"

namespace tide {

// Pages of K/V of full depth, which form a tree: the path to a page is the text so far. Used by one thread at a time.
class PrefixCache {
 public:
  // Creates an empty cache of the sequences of `batch`, which must outlive it. Throws GenerationError: not one page has
  // room in `max_bytes`, or not so many bytes in the memory for K/V.
  PrefixCache(Manifest const& manifest, PagedBatch& batch, std::int64_t max_bytes);
  ~PrefixCache();

  // Begins the empty sequence in a slot with as much of its prompt as is cached, and returns how many tokens these are.
  // The last token is left to be run: it gives the first logits. Where K/V are propagated, two are: a step over one could
  // exit.
  std::int64_t begin(std::size_t slot, std::vector<std::int64_t> const& prompt);

  // Caches a text, which begins with a prompt of so many tokens, as far as the sequence in a slot holds its K/V and there
  // is room. Where it throws, the pages before stay cached.
  void keep(std::size_t slot, std::vector<std::int64_t> text, std::size_t prompt);

  std::int64_t bytes() const { return bytes_; }  // of K/V that it holds; called by any thread

 private:
  using Tokens = std::array<std::int64_t, kPageTokens>;
  using Key = std::pair<std::int64_t, Tokens>;  // the number of the block before, and the token ids
  struct Block {
    Key key;
    std::int64_t number;  // never used again
    Page page;
  };
  using Path = std::vector<std::list<Block>::iterator>;

  std::int64_t root_of(std::size_t slot) const;
  Path path_of(std::int64_t root, std::vector<std::int64_t> const& ids) const;
  void use(Path const& path);
  bool make_room(std::size_t kept);

  PagedBatch& batch_;
  bool const propagates_;
  std::int64_t const max_bytes_, block_bytes_;
  // Least recently used first, and every block before the one that precedes it in a text.
  std::list<Block> blocks_;
  std::map<Key, std::list<Block>::iterator> by_key_;
  std::int64_t numbers_ = 0;
  std::atomic<std::int64_t> bytes_{0};
};

// A cache of at most `max_bytes` for a batch; null: of 0. Throws GenerationError: the batch has no pages, or
// as `PrefixCache`.
std::unique_ptr<PrefixCache> open_prefix_cache(Manifest const& manifest, Batch& batch, std::int64_t max_bytes);

}  // namespace tide

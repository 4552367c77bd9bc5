// Keeps the K/V of texts, and recurrent states after some of their pages, for requests that begin with the same tokens, up to a
// limit, dropping the least recently used first. Both are shared: a sequence copies states before it changes them.
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

// Pages of K/V of full depth, which form a tree: the path to a page is the text so far. A request begins after any page, or,
// of a model with recurrent states, after one that these are kept with. Used by one thread at a time.
class PrefixCache {
 public:
  // Creates an empty cache of the sequences of `batch`, which must outlive it. Throws GenerationError: not one page, with
  // states, has room in `max_bytes`, or not so many bytes in the memory for them.
  PrefixCache(Manifest const& manifest, PagedBatch& batch, std::int64_t max_bytes);
  ~PrefixCache();

  // Begins the empty sequence in a slot with as much of its prompt as is cached, and returns how many tokens these are.
  // The last token is left to be run: it gives the first logits. reads_all: it begins with nothing.
  std::int64_t begin(std::size_t slot, std::vector<std::int64_t> const& prompt, bool reads_all);

  // Tokens of the prompt that the next step in a slot may run over, at most: it must end where states are to be kept.
  std::int64_t max_step_tokens(std::size_t slot, std::vector<std::int64_t> const& prompt) const;

  // Tokens of the text in a slot, which begins with a prompt of so many, after which states can be kept now; 0: none.
  std::int64_t due(std::size_t slot, std::size_t prompt) const;

  // Caches a text, which begins with a prompt of so many tokens, as far as the sequence in a slot holds its K/V and there
  // is room; of recurrent states those that are `due` after the last page of the prompt, or of the answer in place of the
  // ones before, and where the prompt leaves a text that is cached. Where it throws, the pages before stay cached.
  void keep(std::size_t slot, std::vector<std::int64_t> text, std::size_t prompt);

  bool has_states() const { return state_bytes_ > 0; }  // whether a request needs recurrent states to begin
  std::int64_t bytes() const { return bytes_; }         // that it holds; called by any thread

  void check(std::vector<Page>& pages, std::vector<Page>& places) const;  // see invariants.cpp

 private:
  struct Block;
  using Blocks = std::list<Block>;
  using At = Blocks::iterator;
  using Tokens = std::array<std::int64_t, kPageTokens>;
  using Key = std::pair<std::int64_t, Tokens>;  // the number of the block before, and the token ids
  struct Block {
    Key key;
    std::int64_t number;      // above 0, never used again
    Page page;
    At before{};              // of the text, unless the block is its first
    std::size_t followers = 0;  // blocks that this one is before
    bool is_start = false;    // whether it is among `starts_`
    Page place = 0;           // of recurrent states, if it is and the model keeps any
  };
  using Path = std::vector<At>;

  std::int64_t root_of(std::size_t slot) const;
  Path path_of(std::int64_t root, std::vector<std::int64_t> const& ids) const;
  void use(Path const& path);
  void add(Path& path, std::int64_t root, std::vector<std::int64_t> const& text, PagedSequence const& sequence);
  void forget(At block) noexcept;
  void prune(At block, Path const& kept) noexcept;

  PagedBatch& batch_;
  std::int64_t const undo_;  // tokens that recurrent states can take back
  std::int64_t const max_bytes_, block_bytes_, state_bytes_;
  // Blocks after which a request may begin, least recently used first; without recurrent states these are all, and every
  // block is before the one that precedes it in a text.
  Blocks starts_;
  Blocks inner_;  // the others, each with followers
  std::map<Key, At> by_key_;
  std::int64_t numbers_ = 0;
  std::atomic<std::int64_t> bytes_{0};
};

// A cache of at most `max_bytes` for a batch; null: of 0. Throws GenerationError: the batch has no pages, or
// as `PrefixCache`.
std::unique_ptr<PrefixCache> open_prefix_cache(Manifest const& manifest, Batch& batch, std::int64_t max_bytes);

}  // namespace tide

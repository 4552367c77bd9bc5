#include "scheduling/prefix_cache.h"

#include <algorithm>
#include <string>

#include "tide/errors.h"

namespace tide {
namespace {

constexpr std::size_t kSize = kPageTokens;

std::array<std::int64_t, kSize> tokens(std::vector<std::int64_t> const& ids, std::size_t start) {
  std::array<std::int64_t, kSize> block;
  std::copy_n(ids.begin() + static_cast<std::ptrdiff_t>(start), kSize, block.begin());
  return block;
}

}  // namespace

PrefixCache::PrefixCache(Manifest const& manifest, PagedBatch& batch, std::int64_t max_bytes)
    : batch_(batch),
      propagates_(manifest.propagates()),
      max_bytes_(max_bytes),
      block_bytes_(kPageTokens * manifest.kv_token_bytes()) {
  if (max_bytes < block_bytes_) {
    throw GenerationError("prefix_cache_bytes is " + std::to_string(max_bytes) + ", and the K/V of " +
                          std::to_string(kPageTokens) + " tokens have " + std::to_string(block_bytes_));
  }
  if (max_bytes / block_bytes_ >= batch.max_tokens() / kPageTokens) {
    throw GenerationError("prefix_cache_bytes is " + std::to_string(max_bytes) + ", and the memory for K/V holds " +
                          std::to_string(batch.max_tokens() / kPageTokens * block_bytes_));
  }
}

PrefixCache::~PrefixCache() {
  for (Block const& block : blocks_) batch_.pool().release(block.page);
}

std::int64_t PrefixCache::begin(std::size_t slot, std::vector<std::int64_t> const& prompt) {
  Path const path = path_of(root_of(slot), prompt);
  use(path);
  auto const cached = static_cast<std::int64_t>(path.size()) * kPageTokens;
  std::int64_t const length = std::min(cached, static_cast<std::int64_t>(prompt.size()) - (propagates_ ? 2 : 1));
  if (length <= 0) return 0;
  std::vector<Page> pages;
  for (std::int64_t start = 0; start < length; start += kPageTokens) pages.push_back(path[pages.size()]->page);
  batch_.sequence(slot).begin(pages, length);
  return length;
}

void PrefixCache::keep(std::size_t slot, std::vector<std::int64_t> text, std::size_t prompt) {
  text.resize(std::min({text.size(), propagates_ ? prompt : text.size(),
                        static_cast<std::size_t>(batch_.sequence(slot).lengths.back())}));
  std::int64_t const root = root_of(slot);
  Path path = path_of(root, text);
  use(path);
  for (std::size_t start = path.size() * kSize; start + kSize <= text.size(); start += kSize) {
    if (!make_room(path.size())) return;
    std::list<Block> added;
    added.push_back({{path.empty() ? root : path.back()->number, tokens(text, start)},
                     ++numbers_,
                     batch_.sequence(slot).pages()[start / kSize]});
    auto const block = added.begin();
    by_key_.emplace(block->key, block);
    batch_.pool().share(block->page);
    blocks_.splice(path.empty() ? blocks_.end() : path.back(), added);  // nothing can fail any more
    bytes_ += block_bytes_;
    path.push_back(block);
  }
}

// What texts of the sequence's adapter begin after: their K/V are no other adapter's.
std::int64_t PrefixCache::root_of(std::size_t slot) const { return -batch_.sequence(slot).adapter; }

// The blocks of the longest beginning of a text that is cached.
PrefixCache::Path PrefixCache::path_of(std::int64_t root, std::vector<std::int64_t> const& ids) const {
  Path path;
  for (std::size_t start = 0; start + kSize <= ids.size(); start += kSize) {
    auto const found = by_key_.find({path.empty() ? root : path.back()->number, tokens(ids, start)});
    if (found == by_key_.end()) break;
    path.push_back(found->second);
  }
  return path;
}

void PrefixCache::use(Path const& path) {
  for (auto block = path.rbegin(); block != path.rend(); ++block) blocks_.splice(blocks_.end(), blocks_, *block);
}

// Drops blocks, but none of the `kept` most recently used, until one more has room; returns whether it has.
bool PrefixCache::make_room(std::size_t kept) {
  while (bytes_ + block_bytes_ > max_bytes_) {
    if (blocks_.size() == kept) return false;
    by_key_.erase(blocks_.front().key);
    batch_.pool().release(blocks_.front().page);
    blocks_.pop_front();
    bytes_ -= block_bytes_;
  }
  return true;
}

std::unique_ptr<PrefixCache> open_prefix_cache(Manifest const& manifest, Batch& batch, std::int64_t max_bytes) {
  if (max_bytes == 0) return nullptr;
  auto* const paged = dynamic_cast<PagedBatch*>(&batch);
  if (paged == nullptr) {
    throw GenerationError(
        "prefix_cache_bytes is for provider 'cpu': sequences of other providers share no K/V, so leave it at 0");
  }
  if (!manifest.model.states.empty()) {
    throw GenerationError("prefix_cache_bytes is for models whose state is keys and values alone: leave it at 0");
  }
  return std::make_unique<PrefixCache>(manifest, *paged, max_bytes);
}

}  // namespace tide

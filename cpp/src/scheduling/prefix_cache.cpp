#include "scheduling/prefix_cache.h"

#include <algorithm>
#include <string>

#include "tide/errors.h"

namespace tide {
namespace {

constexpr std::int64_t kRoot = 0;
constexpr std::size_t kSize = PrefixCache::kBlockTokens;

std::array<std::int64_t, kSize> tokens(std::vector<std::int64_t> const& ids, std::size_t start) {
  std::array<std::int64_t, kSize> block;
  std::copy_n(ids.begin() + static_cast<std::ptrdiff_t>(start), kSize, block.begin());
  return block;
}

}  // namespace

PrefixCache::PrefixCache(Manifest const& manifest, KvBatch& batch, std::int64_t max_bytes)
    : batch_(batch),
      propagates_(manifest.propagates()),
      max_bytes_(max_bytes),
      block_bytes_(kBlockTokens * manifest.kv_token_bytes()) {
  if (max_bytes < block_bytes_) {
    throw GenerationError("prefix_cache_bytes is " + std::to_string(max_bytes) + ", and the K/V of " +
                          std::to_string(kBlockTokens) + " tokens have " + std::to_string(block_bytes_));
  }
}

std::int64_t PrefixCache::begin(std::size_t slot, std::vector<std::int64_t> const& prompt) {
  Path const path = path_of(prompt);
  use(path);
  auto const cached = static_cast<std::int64_t>(path.size()) * kBlockTokens;
  std::int64_t const length = std::min(cached, static_cast<std::int64_t>(prompt.size()) - (propagates_ ? 2 : 1));
  if (length <= 0) return 0;
  std::vector<std::vector<char> const*> blocks;
  for (std::int64_t start = 0; start < length; start += kBlockTokens) blocks.push_back(&path[blocks.size()]->kv);
  batch_.write_kv(slot, blocks, kBlockTokens, length);
  return length;
}

void PrefixCache::keep(std::size_t slot, std::vector<std::int64_t> text, std::size_t prompt) {
  text.resize(std::min({text.size(), propagates_ ? prompt : text.size(),
                        static_cast<std::size_t>(batch_.sequence(slot).lengths.back())}));
  Path path = path_of(text);
  use(path);
  for (std::size_t start = path.size() * kSize; start + kSize <= text.size(); start += kSize) {
    if (!make_room(path.size())) return;
    auto const first = static_cast<std::int64_t>(start);
    std::list<Block> added;
    added.push_back({{path.empty() ? kRoot : path.back()->number, tokens(text, start)},
                     ++numbers_,
                     batch_.read_kv(slot, first, first + kBlockTokens)});
    auto const block = added.begin();
    by_key_.emplace(block->key, block);
    blocks_.splice(path.empty() ? blocks_.end() : path.back(), added);  // nothing can fail any more
    bytes_ += block_bytes_;
    path.push_back(block);
  }
}

// The blocks of the longest beginning of a text that is cached.
PrefixCache::Path PrefixCache::path_of(std::vector<std::int64_t> const& ids) const {
  Path path;
  for (std::size_t start = 0; start + kSize <= ids.size(); start += kSize) {
    auto const found = by_key_.find({path.empty() ? kRoot : path.back()->number, tokens(ids, start)});
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
    blocks_.pop_front();
    bytes_ -= block_bytes_;
  }
  return true;
}

std::unique_ptr<PrefixCache> open_prefix_cache(Manifest const& manifest, Batch& batch, std::int64_t max_bytes) {
  if (max_bytes == 0) return nullptr;
  auto* const kv_batch = dynamic_cast<KvBatch*>(&batch);
  if (kv_batch == nullptr) {
    throw GenerationError(
        "prefix_cache_bytes is for provider 'cpu': the K/V of other providers cannot be copied, so leave it at 0");
  }
  return std::make_unique<PrefixCache>(manifest, *kv_batch, max_bytes);
}

}  // namespace tide

#include "scheduling/prefix_cache.h"

#include <algorithm>
#include <optional>
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

std::size_t whole_pages(std::size_t tokens) { return tokens / kSize * kSize; }

}  // namespace

PrefixCache::PrefixCache(Manifest const& manifest, PagedBatch& batch, std::int64_t max_bytes)
    : batch_(batch),
      undo_(manifest.model.undo()),
      max_bytes_(max_bytes),
      // Of a model without K/V, the tokens take memory.
      block_bytes_(std::max<std::int64_t>(kPageTokens * manifest.kv_token_bytes(), sizeof(Block))),
      state_bytes_(batch.pool().states.item_bytes()) {
  std::string const asked = "prefix_cache_bytes is " + std::to_string(max_bytes) + ", and the ";
  if (max_bytes < block_bytes_ + state_bytes_) {
    throw GenerationError(asked + "K/V of " + std::to_string(kPageTokens) + " tokens" +
                          (has_states() ? " with the recurrent states after them have " : " have ") +
                          std::to_string(block_bytes_ + state_bytes_));
  }
  std::int64_t const places = batch.pool().states.size() - static_cast<std::int64_t>(batch.free_slots());
  std::int64_t holds = batch.max_tokens() / kPageTokens * block_bytes_;
  if (has_states()) holds = std::min(holds, std::max<std::int64_t>(places, 0) * state_bytes_);
  if (max_bytes >= holds) throw GenerationError(asked + "memory for K/V holds " + std::to_string(holds));
}

PrefixCache::~PrefixCache() {
  while (!starts_.empty()) forget(starts_.begin());
  for (Block const& block : inner_) batch_.pool().release(block.page);
}

std::int64_t PrefixCache::begin(std::size_t slot, std::vector<std::int64_t> const& prompt, bool reads_all) {
  PagedSequence& sequence = batch_.sequence(slot);
  if (has_states()) sequence.kept = 0;
  if (reads_all) return 0;
  Path path = path_of(root_of(slot), prompt);
  auto const fits = [&] { return path.back()->is_start && path.size() * kSize < prompt.size(); };
  while (has_states() && !path.empty() && !fits()) path.pop_back();
  use(path);
  auto const cached = static_cast<std::int64_t>(path.size()) * kPageTokens;
  std::int64_t const length = std::min(cached, static_cast<std::int64_t>(prompt.size()) - 1);
  if (length <= 0) return 0;
  std::vector<Page> pages;
  for (std::int64_t start = 0; start < length; start += kPageTokens) pages.push_back(path[pages.size()]->page);
  sequence.begin(pages, length, has_states() ? std::optional(path.back()->place) : std::nullopt);
  if (has_states()) sequence.kept = length;
  return length;
}

std::int64_t PrefixCache::max_step_tokens(std::size_t slot, std::vector<std::int64_t> const& prompt) const {
  if (!has_states()) return kNoLimit;
  auto const length = static_cast<std::size_t>(batch_.sequence(slot).length()), last = whole_pages(prompt.size() - 1);
  Path const path = path_of(root_of(slot), prompt);
  std::size_t const cached = path.size() * kSize;
  std::size_t stop = prompt.size();
  if (prompt.size() - last > static_cast<std::size_t>(undo_) && length < last) stop = last;
  if (length < cached && cached < last && !path.back()->is_start) stop = cached;  // where texts with this beginning part
  return static_cast<std::int64_t>(stop - length);
}

std::int64_t PrefixCache::due(std::size_t slot, std::size_t prompt) const {
  PagedSequence const& sequence = batch_.sequence(slot);
  auto const length = static_cast<std::size_t>(sequence.lengths.back());
  // Before the last token of the prompt, for a request with the same prompt.
  auto const after = static_cast<std::int64_t>(whole_pages(length > prompt ? length : std::min(length, prompt - 1)));
  return after > sequence.kept && sequence.knows(after) ? after : 0;
}

void PrefixCache::keep(std::size_t slot, std::vector<std::int64_t> text, std::size_t prompt) {
  PagedSequence& sequence = batch_.sequence(slot);
  std::int64_t const root = root_of(slot);
  std::size_t const last = whole_pages(prompt - 1), before = has_states() ? static_cast<std::size_t>(sequence.kept) : 0;
  if (has_states()) {
    auto const after = static_cast<std::size_t>(due(slot, prompt));
    if (after == 0 || (after < last && path_of(root, text).size() * kSize != after)) return;
    sequence.kept = static_cast<std::int64_t>(after);
    if (static_cast<std::int64_t>(after / kSize) * block_bytes_ + state_bytes_ > max_bytes_) return;
    text.resize(after);
  } else {
    std::size_t const room = static_cast<std::size_t>(max_bytes_ / block_bytes_) * kSize;
    text.resize(std::min({text.size(), room, static_cast<std::size_t>(sequence.lengths.back())}));
  }
  Path path = path_of(root, text);
  use(path);
  if (before > last && path.size() * kSize >= before && path[before / kSize - 1]->is_start) {
    forget(path[before / kSize - 1]);  // of an answer the newest states are enough
  }
  try {
    add(path, root, text, sequence);
  } catch (...) {
    if (!path.empty()) prune(path.back(), {});
    throw;
  }
}

// Adds the blocks of a text after those of `path`, and the states after the last one. It has room once others are dropped.
void PrefixCache::add(Path& path, std::int64_t root, std::vector<std::int64_t> const& text, PagedSequence const& sequence) {
  std::size_t const count = text.size() / kSize;
  path.reserve(count);
  bool const adds_states = has_states() && !(path.size() == count && path.back()->is_start);
  std::int64_t const added = static_cast<std::int64_t>(count - path.size()) * block_bytes_ + (adds_states ? state_bytes_ : 0);
  while (bytes_ + added > max_bytes_) {
    At const dropped = starts_.begin();
    forget(dropped);
    prune(dropped, path);
  }
  while (path.size() < count) {
    Blocks made;
    made.push_back({{path.empty() ? root : path.back()->number, tokens(text, path.size() * kSize)},
                    ++numbers_,
                    sequence.pages()[path.size()]});
    At const block = made.begin();
    by_key_.emplace(block->key, block);
    batch_.pool().share(block->page);  // nothing can fail any more
    bytes_ += block_bytes_;
    At const next = path.empty() ? starts_.end() : path.back();
    if (!path.empty()) {
      block->before = path.back();
      ++path.back()->followers;
    }
    block->is_start = !has_states();
    if (block->is_start) starts_.splice(next, made);
    inner_.splice(inner_.end(), made);
    path.push_back(block);
  }
  if (!adds_states) return;
  path.back()->place = sequence.place();
  path.back()->is_start = true;
  batch_.pool().states.share(sequence.place());
  bytes_ += state_bytes_;
  starts_.splice(starts_.end(), inner_, path.back());
}

std::int64_t PrefixCache::root_of(std::size_t slot) const { return batch_.sequence(slot).cache_root; }

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

// Notes a use of the blocks of a path; of those with recurrent states, of the last alone: a text that goes on needs no other.
void PrefixCache::use(Path const& path) {
  for (auto block = path.rbegin(); block != path.rend(); ++block) {
    if (!(*block)->is_start) continue;
    starts_.splice(starts_.end(), starts_, *block);
    if (has_states()) return;
  }
}

// Lets no request begin after a block any more; its K/V stay.
void PrefixCache::forget(At block) noexcept {
  block->is_start = false;
  inner_.splice(inner_.end(), starts_, block);
  if (!has_states()) return;
  batch_.pool().states.release(block->place);
  bytes_ -= state_bytes_;
}

// Drops a block, and those before it, as far as no request can begin after them; not the last one of the path `kept`.
void PrefixCache::prune(At block, Path const& kept) noexcept {
  bool first = false;
  while (!first && !block->is_start && block->followers == 0 && (kept.empty() || block != kept.back())) {
    first = block->key.first <= 0;
    At const before = block->before;
    if (!first) --before->followers;
    batch_.pool().release(block->page);
    by_key_.erase(block->key);
    inner_.erase(block);
    bytes_ -= block_bytes_;
    block = before;
  }
}

std::unique_ptr<PrefixCache> open_prefix_cache(Manifest const& manifest, Batch& batch, std::int64_t max_bytes) {
  if (max_bytes == 0) return nullptr;
  auto* const paged = dynamic_cast<PagedBatch*>(&batch);
  if (paged == nullptr) {
    throw GenerationError(
        "prefix_cache_bytes is for provider 'cpu': sequences of other providers share no K/V, so leave it at 0");
  }
  return std::make_unique<PrefixCache>(manifest, *paged, max_bytes);
}

}  // namespace tide

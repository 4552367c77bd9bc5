// What holds after every step of a scheduler, checked where NDEBUG is not defined. What does not hold ends the process.
#ifndef NDEBUG
#include <cstdlib>
#include <iostream>
#include <map>
#include <new>
#include <set>

#include "paged/batch.h"
#include "scheduling/prefix_cache.h"
#include "scheduling/step_loop.h"

namespace tide {
namespace {

void holds(bool condition, char const* what) {
  if (condition) return;
  std::cerr << "invariant broken: " << what << std::endl;
  std::abort();
}

}  // namespace

void StepLoop::check() const try {
  std::size_t taken = 0;
  std::int64_t reserved = 0;
  for (auto const& job : slots_) {
    if (job == nullptr) continue;
    ++taken;
    reserved += job->reserved();
    holds(!job->ended(), "a request that has ended has no slot");
  }
  holds(is_stream_ || reserved <= kv_tokens_, "requests with a slot fit the memory for K/V");
  holds(batch_->free_slots() == slots_.size() - taken, "a slot is free or of one request");
  std::lock_guard<std::mutex> const lock(mutex_);
  holds(running_ == taken, "requests that run are those with a slot");
  for (std::size_t i = 0; i < waiting_.size(); ++i) {
    holds(!waiting_[i]->ended(), "a request that waits has not ended");
    holds(i == 0 || waiting_[i - 1]->number < waiting_[i]->number, "requests wait in the order in which they came");
  }
  auto const* const paged = dynamic_cast<PagedBatch const*>(batch_.get());
  if (paged == nullptr) return;
  std::vector<Page> pages, places;
  paged->check(pages, places);
  if (prefixes_ != nullptr) prefixes_->check(pages, places);
  paged->pool().check(pages);
  paged->pool().states.check(places);
} catch (std::bad_alloc const&) {  // it takes memory itself
}

// Appends the pages and the places of recurrent states that the sequences hold.
void PagedBatch::check(std::vector<Page>& pages, std::vector<Page>& places) const {
  std::set<std::size_t> const free(free_.begin(), free_.end());
  holds(free.size() == free_.size(), "a slot is free once");
  for (std::size_t slot = 0; slot < sequences_.size(); ++slot) {
    holds((sequences_[slot] == nullptr) == (free.count(slot) == 1), "a slot without a sequence is free");
    if (sequences_[slot] != nullptr) sequences_[slot]->check(pages, places);
  }
}

void PagedSequence::check(std::vector<Page>& pages, std::vector<Page>& places) const {
  auto const width = static_cast<std::size_t>(manifest_.model.hidden_size);
  holds(pages_.size() >= pages_of(length()), "a sequence has pages for all of its tokens");
  holds(lengths.back() >= 0 && pending[0].empty(), "nothing is pending before the first segment");
  for (std::size_t k = 1; k < lengths.size(); ++k) {
    holds(lengths[k] <= lengths[k - 1], "no segment has run over more tokens than the one before");
    auto const behind = static_cast<std::size_t>(lengths[k - 1] - lengths[k]);
    holds(pending[k].size() == behind * width, "what a segment has not run over is pending before it");
  }
  pages.insert(pages.end(), pages_.begin(), pages_.end());
  for (std::vector<Page> const* const held : {&place_, &before_}) places.insert(places.end(), held->begin(), held->end());
}

// Appends the pages and places that the cache holds.
void PrefixCache::check(std::vector<Page>& pages, std::vector<Page>& places) const {
  std::map<std::int64_t, std::size_t> followers;
  std::int64_t bytes = 0;
  for (Blocks const* const blocks : {&starts_, &inner_}) {
    for (Block const& block : *blocks) {
      auto const found = by_key_.find(block.key);
      holds(found != by_key_.end() && &*found->second == &block, "each block is found by its text");
      holds(block.is_start == (blocks == &starts_), "a block is among those after which a request may begin, or not");
      bytes += block_bytes_ + (block.is_start ? state_bytes_ : 0);
      pages.push_back(block.page);
      if (block.is_start && has_states()) places.push_back(block.place);
      if (block.key.first <= 0) continue;
      holds(block.before->number == block.key.first, "a block follows the one before it in the text");
      ++followers[block.key.first];
    }
  }
  for (auto const& [key, block] : by_key_) {
    holds(block->followers == followers[block->number], "a block counts those that follow it");
    holds(block->is_start || block->followers > 0, "a block is kept for requests that begin after it or a later one");
  }
  holds(by_key_.size() == starts_.size() + inner_.size(), "a block is there once");
  holds(bytes == bytes_ && bytes <= max_bytes_, "a cache counts its bytes, and has no more than it may");
}

// held: the items that are known to be in use, as often as they are.
void MemoryPool::check(std::vector<Page> const& held) const {
  std::lock_guard<std::mutex> const lock(mutex_);
  std::vector<std::uint32_t> counts(references_.size());
  for (Page const item : held) {
    holds(static_cast<std::size_t>(item) < counts.size(), "an item in use was taken");
    ++counts[static_cast<std::size_t>(item)];
  }
  std::vector<bool> free(references_.size());
  for (Page const item : free_) {
    holds(!free[static_cast<std::size_t>(item)], "an item is free once");
    free[static_cast<std::size_t>(item)] = true;
  }
  for (std::size_t item = 0; item < counts.size(); ++item) {
    holds(counts[item] <= references_[item], "an item in use is counted as often as it is used");
    holds(free[item] == (references_[item] == 0), "an item without a use is free");
  }
}

}  // namespace tide
#endif

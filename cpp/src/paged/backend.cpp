#include "paged/backend.h"

#include <algorithm>
#include <utility>

#include "generation_error.h"
#include "paged/batch.h"

namespace tide {

PagedBackend::PagedBackend(Bundle opened, std::optional<std::int64_t> threads, AdapterFolders const& adapters,
                           Replacements const& replacements)
    : Backend(std::move(opened), "cpu"),
      adapters_(bundle(), adapters),
      pool_(manifest()),
      networks_(bundle(), threads, replacements),
      threads_(threads) {}

std::unique_ptr<Drafts> PagedBackend::start_drafts(std::size_t slots, Batch& batch) {
  if (!manifest().drafter) return nullptr;
  bundle().check_weights();
  return or_generation_error("cannot start the drafter", [&] {
    std::lock_guard<std::mutex> const lock(mutex_);
    if (!drafter_) drafter_ = std::make_unique<DrafterNetwork>(bundle(), threads_);
    return std::make_unique<PagedDrafts>(*drafter_, slots, static_cast<PagedBatch&>(batch));
  });
}

std::unique_ptr<Batch> PagedBackend::start_batch(double compaction_threshold, std::size_t slots) {
  bundle().check_weights();
  return or_generation_error("cannot start a batch", [&] {
    return std::make_unique<PagedBatch>(networks_, manifest(), pool_, adapters_, compaction_threshold,
                                        std::min(slots, max_batch_size()));
  });
}

}  // namespace tide

// Runs a bundle by ONNX Runtime on the CPU: the networks of its segments, and the pool of K/V.
#pragma once

#include <mutex>
#include <optional>

#include "onnxruntime/session.h"
#include "paged/adapters.h"
#include "paged/paged_drafts.h"
#include "paged/networks.h"
#include "paged/pool.h"
#include "sequence.h"

namespace tide {

class PagedBackend final : public Backend {
 public:
  // Loads the networks; `threads` are checked. Throws BundleError: as `Networks`. ProviderError: ONNX Runtime is missing or
  // too old. GenerationError: no memory can be reserved. ConfigError: an adapter cannot be used.
  PagedBackend(Bundle bundle, std::optional<std::int64_t> threads, AdapterFolders const& adapters,
               Replacements const& replacements);

  std::int64_t adapter(std::string const& name) const override { return adapters_.row(name); }

  std::unique_ptr<Drafts> start_drafts(std::size_t slots, Batch& batch) override;

  std::size_t max_batch_size() const override { return networks_.max_sequences(); }
  std::unique_ptr<Batch> start_batch(double compaction_threshold, std::size_t slots) override;

 private:
  Adapters const adapters_;
  PagePool pool_;
  Networks networks_;
  std::optional<std::int64_t> const threads_;
  std::mutex mutex_;
  std::unique_ptr<DrafterNetwork> drafter_;  // once it is used
};

}  // namespace tide

// Runs ONNX Runtime on the CPU: the step graph for a stream, the batch networks for lists and schedulers, and the pool of K/V.
#pragma once

#include "onnxruntime/session.h"
#include <mutex>
#include <optional>

#include "paged/adapters.h"
#include "paged/drafter.h"
#include "paged/networks.h"
#include "paged/pool.h"
#include "sequence.h"

namespace tide {

class PagedBackend final : public Backend {
 public:
  // Loads the graph; `threads` are checked. Throws BundleError: the graph does not load, or its inputs and outputs do
  // not match the manifest. ProviderError: ONNX Runtime is missing or too old. GenerationError: no memory can be
  // reserved. ConfigError: an adapter cannot be used. replacement: as of `load_network`.
  PagedBackend(Bundle bundle, std::optional<std::int64_t> threads, AdapterFolders const& adapters,
               std::string const* replacement = nullptr);

  std::int64_t adapter(std::string const& name) const override { return adapters_.row(name); }

  std::unique_ptr<Sequence> start(std::vector<float> const& thresholds, std::int64_t max_pending) override;

  std::unique_ptr<Drafts> start_drafts(std::size_t slots) override;

  std::size_t max_batch_size() const override { return batch_networks_.max_batch_size(); }
  std::unique_ptr<Batch> start_batch(double compaction_threshold, std::size_t slots) override;

 private:
  ReturnsFreeMemory returns_free_memory_;
  Adapters const adapters_;
  PagePool pool_;
  Ort::Env env_{nullptr};
  NetworkSession session_;
  BatchNetworks batch_networks_;
  std::optional<std::int64_t> const threads_;
  std::mutex mutex_;
  std::unique_ptr<DrafterNetwork> drafter_;  // once it is used
};

}  // namespace tide

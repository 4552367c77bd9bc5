// An opened bundle: what all sequences of an engine share, on whatever runs them.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "bundle/store.h"
#include "sequence.h"
#include "tide/runtime.h"

namespace tide {

class BatchNetworks;

// May be used by several threads at once.
class Backend {
 public:
  explicit Backend(Bundle bundle) : bundle_(std::move(bundle)) {}
  virtual ~Backend() = default;

  Bundle const& bundle() const { return bundle_; }
  Manifest const& manifest() const { return bundle_.manifest; }

  // Starts an empty sequence, which must not outlive the backend. The arguments are those of `Engine::start`, checked;
  // `room` is ignored where K/V buffers do not grow.
  virtual std::unique_ptr<Sequence> start(std::vector<float> const& thresholds, std::int64_t max_pending,
                                          std::int64_t room) = 0;

  // The networks for batches; nullptr: this backend decodes one sequence at a time.
  virtual BatchNetworks* batch_networks() { return nullptr; }

 private:
  Bundle bundle_;
};

// Opens a bundle with the provider of `options`. Throws ProviderError: the provider is unknown or cannot run this
// bundle here, or plugins or threads are set where they have no effect. ConfigError: threads below 1. BundleError: the
// bundle is damaged.
std::shared_ptr<Backend> open_backend(Bundle bundle, LoadOptions const& options);

}  // namespace tide

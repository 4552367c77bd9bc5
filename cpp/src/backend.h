// A checked bundle, open in what runs it: all that the sequences of an engine share.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "bundle/store.h"
#include "sequence.h"
#include "tide/runtime.h"

namespace tide {

class BatchNetworks;

// Safe to use from several threads.
class Session {
 public:
  explicit Session(Bundle bundle) : bundle_(std::move(bundle)) {}
  virtual ~Session() = default;

  Bundle const& bundle() const { return bundle_; }
  Manifest const& manifest() const { return bundle_.manifest; }

  // An empty sequence, which must not outlive the session. The values are checked; `room` is of K/V buffers that grow.
  virtual std::unique_ptr<Sequence> start(std::vector<float> const& thresholds, std::int64_t max_pending,
                                          std::int64_t room) = 0;

  // For several sequences at once; none: they are run one at a time.
  virtual BatchNetworks* batch_networks() { return nullptr; }

 private:
  Bundle bundle_;
};

// Opens the bundle on what the options ask for. Throws ProviderError: that is unknown, or cannot run this bundle here;
// plugins where no engine holds any, threads for a GPU. ConfigError: threads below 1. BundleError: the bundle is
// damaged.
std::shared_ptr<Session> open_session(Bundle bundle, LoadOptions const& options);

}  // namespace tide

// The segment networks on ONNX Runtime's CPU, where they judge what TensorRT is given. No provider offers them: the
// branched graph does the same there with less work. The tests run lanes and state machine on them.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "segmented/network_spec.h"
#include "backend.h"

namespace tide {

class OrtNetworks {
 public:
  // Throws ProviderError: the bundle has no segment networks, or they are bfloat16, or ONNX Runtime is too old.
  // BundleError: a network does not load, or is not the manifest's.
  OrtNetworks(Bundle const& bundle, std::optional<std::int64_t> threads);

  std::vector<NetworkSpec> const& specs() const { return specs_; }

  // Each network with bindings of its own, for one lane in the host's memory; a run is done when it is called. They
  // must not outlive this.
  std::vector<std::unique_ptr<Network>> for_a_lane();

 private:
  struct Sessions;

  std::vector<NetworkSpec> specs_;
  std::shared_ptr<Sessions> sessions_;
};

// Those on the host.
std::shared_ptr<Session> open_networks(Bundle bundle, std::optional<std::int64_t> threads);

}  // namespace tide

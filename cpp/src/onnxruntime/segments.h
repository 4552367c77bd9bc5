// The segment networks on ONNX Runtime's CPU, a reference for TensorRT's engines and for the tests of segmented/. No
// provider uses them: the branched graph does the same on the CPU with less work.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "sequence.h"
#include "segmented/network_spec.h"

namespace tide {

class OrtNetworks {
 public:
  // Loads the networks. Throws ProviderError: the bundle has no segment networks, they are bfloat16, or ONNX Runtime is
  // too old. BundleError: a network does not load or does not match the manifest.
  OrtNetworks(Bundle const& bundle, std::optional<std::int64_t> threads);

  std::vector<NetworkSpec> const& specs() const { return specs_; }

  // The networks, with their own bindings, for one set of buffers in host memory; `run` returns when it is
  // done. They must not outlive this object.
  std::vector<std::unique_ptr<Network>> bind();

 private:
  struct Loaded;

  std::vector<NetworkSpec> specs_;
  std::shared_ptr<Loaded> loaded_;
};

// A backend on these networks.
std::shared_ptr<Backend> open_networks(Bundle bundle, std::optional<std::int64_t> threads);

}  // namespace tide

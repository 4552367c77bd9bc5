// Runs the segment networks in ONNX Runtime: on CUDA (provider "cuda"), and on the CPU as a reference for
// GPUs and for tests; on the CPU the batch networks are faster.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "onnxruntime/session.h"
#include "sequence.h"
#include "segmented/device.h"
#include "segmented/network_spec.h"

namespace tide {

namespace cuda {
struct SharedStream;
}

class OrtNetworks {
 public:
  // Throws ProviderError: the bundle has no such segment networks, they are bfloat16 on the CPU, or ONNX Runtime is too old
  // or has no provider for CUDA.
  static void check(Bundle const& bundle, std::optional<int> gpu);

  // Loads the networks. gpu: the number of the GPU that they run on; none: the CPU. stream: on which they do. Throws
  // ProviderError: as `check`, or a library of CUDA is missing. BundleError: a network does not load or does not match the
  // manifest.
  OrtNetworks(Bundle const& bundle, std::optional<std::int64_t> threads, std::optional<int> gpu = std::nullopt,
              std::shared_ptr<cuda::SharedStream> stream = nullptr);

  std::vector<NetworkSpec> const& specs() const { return specs_; }

  // The networks of sequences or of the drafter, with their own bindings, for one set of buffers; on a GPU `run` queues on
  // the stream, in this thread's turn. They must not outlive this object.
  std::vector<std::unique_ptr<Network>> bind(NetworksOf part);

 private:
  struct Loaded;

  NetworkSession load(Bundle const& bundle, std::string const& file, std::optional<std::int64_t> threads);

  std::optional<int> const gpu_;
  std::vector<NetworkSpec> specs_;
  std::shared_ptr<Loaded> loaded_;
};

// A backend on these networks on the CPU.
std::shared_ptr<Backend> open_networks(Bundle bundle, std::optional<std::int64_t> threads);

bool has_gpu();  // whether CUDA finds one; without CUDA: no

// A backend on these networks on a GPU, by its number. Throws ProviderError: as `OrtNetworks`, or the GPU cannot be
// used. BundleError: as `OrtNetworks`.
std::shared_ptr<Backend> open_cuda(Bundle bundle, int gpu);

}  // namespace tide

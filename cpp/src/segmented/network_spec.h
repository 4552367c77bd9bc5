// Lists the tensors of a bundle's segment networks and head, from its manifest. Networks are checked against these lists
// before tensors are bound, because only addresses are bound.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "tide/manifest.h"

namespace tide {

constexpr std::int64_t kTokens = -1, kSequences = -2, kKeys = -3;  // the dynamic dimensions of a run

// The sizes of a run: tokens of each sequence, sequences, tokens of the K/V buffers that attention reads.
struct RunSize {
  std::int64_t tokens = 1, batch_size = 1, keys = 1;

  std::tuple<std::int64_t, std::int64_t, std::int64_t> as_tuple() const { return {tokens, batch_size, keys}; }
};

// One tensor of a network: element type by name ("float32", "float16", "bfloat16", "int64", "int32") and shape.
struct Tensor {
  std::string name;
  bool is_input;
  std::string dtype;
  std::vector<std::int64_t> shape;

  // The shape, and the bytes, in a run.
  std::vector<std::int64_t> dims(RunSize const& run) const;
  std::size_t size(RunSize const& run = {}) const;
};

// The inputs and outputs of a network.
struct NetworkSpec {
  std::string name;
  std::vector<Tensor> tensors;  // inputs first
  std::int64_t keys = 0;        // tokens of its K/V buffers

  std::size_t index(std::string const& tensor) const;  // in `tensors`; their number if there is none of this name
  Tensor const& operator[](std::string const& tensor) const { return tensors.at(index(tensor)); }

  // Whether it is an input that is a K/V buffer: of the segment, or of an earlier one that it reads.
  bool is_kv_input(std::size_t number) const;

  // The index of the input whose memory an output updates in place; else `number` itself.
  std::size_t alias(std::size_t number) const;

  // Throws BundleError, naming the first difference, if a network has other tensors. path: its file, for the message.
  void check(std::vector<Tensor> const& actual, std::string const& path) const;
};

// The specifications of a bundle's networks: the segments, shallowest first, then kHead, kBest, kCandidates.
std::vector<NetworkSpec> network_specs(Manifest const& manifest);

// The same with kDrafter's at the end, if it is asked for and the bundle has one.
std::vector<NetworkSpec> network_specs(Manifest const& manifest, bool drafter);

// The profiles of one network: the head, and what reads its logits, take fewer tokens than the segments, and as rows of
// any number of sequences.
std::vector<Profile> profiles_of(NetworkSpec const& spec, PlansInfo const& plans, NetworksInfo const& info);

// The networks that are opened together: those of sequences, or the drafter's.
enum class NetworksOf { sequences, drafter };
bool is_of(NetworkSpec const& spec, NetworksOf part);

// The index of the first profile, which is the narrowest, that takes so many tokens of so many sequences. Throws
// GenerationError: none does.
std::size_t pick_profile(std::vector<Profile> const& profiles, std::int64_t tokens, std::int64_t batch_size = 1);

// A network that runs on one device.
class Network {
 public:
  virtual ~Network() = default;

  // Queues a run. addresses: of the specification's tensors, in its order.
  virtual void run(std::vector<std::byte*> const& addresses, RunSize const& size) = 0;
};

}  // namespace tide

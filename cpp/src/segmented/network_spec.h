// The networks of a bundle as lanes run them: tensors in a fixed order, at addresses, for a number of tokens of one
// sequence. `NetworkSpec` says what tensors a network has, from the manifest alone; every back end checks its networks
// against it before anything is bound, because what is bound are bare addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tide/manifest.h"

namespace tide {

constexpr std::int64_t kTokens = -1, kRows = -2;  // the free dimensions: tokens in a run, and sequences (here always 1)

// One tensor of a network: element type by name ("float32", "float16", "bfloat16", "int64", "bool") and shape.
struct Tensor {
  std::string name;
  bool is_input;
  std::string dtype;
  std::vector<std::int64_t> shape;

  std::vector<std::int64_t> dims(std::int64_t tokens) const;  // in a run of so many
  std::size_t size(std::int64_t tokens = 1) const;            // its bytes
};

// What goes into a network and comes out.
struct NetworkSpec {
  std::string name;
  std::vector<Tensor> tensors;  // inputs first

  std::size_t place(std::string const& tensor) const;  // among `tensors`; how many there are if it has none
  Tensor const& operator[](std::string const& tensor) const { return tensors.at(place(tensor)); }

  // For the output of a K/V buffer the place of its input, which is the same memory; else the place itself.
  std::size_t alias(std::size_t place) const;

  // Refuses a network that was found with other tensors; `where` is the file, for the message. Throws BundleError,
  // naming the first that differs.
  void check(std::vector<Tensor> const& found, std::string const& where) const;
};

// Of every network of a bundle: the segments, shallowest first, then the head.
std::vector<NetworkSpec> network_specs(Manifest const& manifest);

// Tokens to run for `count` of them behind `length` in the cache: the next power of two, where it fits a run (`most`
// tokens, the largest optimization profile) and the K/V buffers (`capacity` tokens).
std::int64_t padded(std::int64_t count, std::int64_t length, std::int64_t most, std::int64_t capacity);

// Of one network: the head takes fewer tokens than the segments, and those of several sequences as tokens of one.
std::vector<Profile> profiles_of(NetworkSpec const& spec, EnginesInfo const& engines, NetworksInfo const& info);

// Number of the first profile that takes so many tokens of one sequence: the narrowest, as they are listed. Throws
// GenerationError: none does.
std::size_t pick_profile(std::vector<Profile> const& profiles, std::int64_t tokens);

// A network that can be run on one lane's device.
class Network {
 public:
  virtual ~Network() = default;

  // Queues a run over `tokens` tokens; `addresses` are those of the spec's tensors, K/V outputs their inputs'.
  virtual void run(std::vector<std::byte*> const& addresses, std::int64_t tokens) = 0;
};

}  // namespace tide

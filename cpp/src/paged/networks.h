// Holds the batch networks as ONNX Runtime sessions, opened when a batch is first requested, because each session packs
// another copy of the weights.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "bundle/store.h"
#include "onnxruntime/session.h"

namespace tide {

// The layers of one segment: first .. first + count - 1.
struct Layers {
  std::size_t first, count;
};
Layers layers_of(Manifest const& manifest, std::size_t k);

// Those of segment k with K/V of their own, ascending.
std::vector<std::size_t> kv_written(Manifest const& manifest, std::size_t k);

// The last dimension of a tensor; 0, which none has, where it is not a number or there is no such tensor.
std::int64_t last_dimension(std::vector<Tensor> const& tensors, char const* name);

// Numbers of the recurrent states of the model that are of these layers.
std::vector<std::size_t> states_of(Manifest const& manifest, Layers const& layers);

// Whether adapters may change what one of these layers computes.
bool adapts(Manifest const& manifest, Layers const& layers);

// Adds the inputs by which a network of these layers finds the adapters of sequences to a specification.
void add_adapters(NetworkSpec& spec, Manifest const& manifest, Layers const& layers);

// Adds the recurrent states of these numbers to a specification, as inputs and outputs.
void add_states(NetworkSpec& spec, Manifest const& manifest, std::vector<std::size_t> const& numbers);

// Adds the pages of `layers` to a specification: those that are read as inputs, and as outputs those that are written.
void add_pages(NetworkSpec& spec, Manifest const& manifest, std::vector<std::size_t> const& read,
               std::vector<std::size_t> const& written);

// Sessions that any number of batches run.
struct BatchSessions {
  ReturnsFreeMemory returns_free_memory;
  Ort::Env env{"tide"};  // shared by the whole process
  std::vector<NetworkSession> segments;  // shallowest first
  NetworkSession head;                   // takes the states that tokens exited with
  std::size_t exit_size = 0;             // width D' of these
};

// The batch networks of a backend. May be used by several threads at once.
class BatchNetworks {
 public:
  // `bundle` must outlive it. threads: of one run.
  BatchNetworks(Bundle const& bundle, std::optional<std::int64_t> threads) : bundle_(bundle), threads_(threads) {}

  // Sequences that can be decoded at the same time; 1: the bundle holds no networks for batches.
  std::size_t max_batch_size() const;

  // Throws GenerationError: the bundle holds no networks for batches. BundleError: a network does not load or does not
  // match the manifest.
  std::shared_ptr<BatchSessions> sessions();

 private:
  std::shared_ptr<BatchSessions> open() const;
  NetworkSession load(Ort::Env const& env, std::string const& name) const;
  void check(Ort::Session const& session, NetworkSpec const& spec, std::string const& name) const;

  Bundle const& bundle_;
  std::optional<std::int64_t> const threads_;
  std::mutex mutex_;
  std::shared_ptr<BatchSessions> opened_;
};

}  // namespace tide

// Opens the networks of a bundle's segments, and of its head, as ONNX Runtime sessions.
#pragma once

#include <filesystem>
#include <optional>
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

// Where graphs are that replace a bundle's, on the same weights: a folder with files of the same names; none: there are none.
using Replacements = std::optional<std::filesystem::path>;

// Sessions that any number of batches run, by several threads at once.
class Networks {
 public:
  // threads: of one run. Throws BundleError: a network is missing, does not load, or does not match the manifest.
  Networks(Bundle const& bundle, std::optional<std::int64_t> threads, Replacements const& replacements);

  // Sequences that a run can be over.
  std::size_t max_sequences() const { return one_sequence_ ? 1 : kMaxSequences; }

  std::size_t segments() const { return segments_.size(); }
  Ort::Session& segment(std::size_t k) { return segments_[k]; }  // shallowest first
  Ort::Session& head() { return head_; }                         // takes the exit states that tokens exited with

  std::size_t exit_size() const { return exit_size_; }    // width D' of these
  std::size_t draft_size() const { return draft_size_; }  // width H of what the drafter reads; 0: it reads the same

 private:
  static constexpr std::size_t kMaxSequences = 1024;

  void open_segment(Bundle const& bundle, std::size_t k, NetworkSession session);

  ReturnsFreeMemory returns_free_memory_;
  Ort::Env env_{"tide"};  // shared by the whole process
  std::vector<NetworkSession> segments_;
  NetworkSession head_;
  std::size_t exit_size_ = 0, draft_size_ = 0;
  bool one_sequence_ = false;  // because the model counts positions on from one token's
};

}  // namespace tide

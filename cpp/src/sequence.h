// The interfaces of a backend, which runs an opened bundle, and of one sequence on it, behind `State`. In the branched
// graph the graph decides how deep a token goes (branched/sequence.cpp); with a network per segment the sequence does
// (segmented/sequence.cpp).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "bundle/store.h"
#include "tide/runtime.h"

namespace tide {

// `State` has checked all arguments. A step that throws leaves the sequence unchanged.
class Sequence {
 public:
  virtual ~Sequence() = default;

  // As `State::step`; `total` is the sequence's number of tokens including the new ones.
  virtual StepResult step(std::int64_t const* ids, std::size_t count, std::int64_t total, std::int64_t logits_to_keep,
                          bool full) = 0;
  virtual void rewind(std::int64_t length) = 0;
  virtual void set_thresholds(std::vector<float> const& thresholds) = 0;

  virtual std::vector<std::int64_t> const& lengths() const = 0;  // tokens in each segment's K/V, shallowest first
  virtual std::vector<std::int64_t> const& computed() const { return lengths(); }  // tokens each segment has run over
  virtual std::int64_t limit() const = 0;                                          // tokens it may have, at most
  virtual std::int64_t capacity() const = 0;  // tokens that the K/V buffers hold before they grow

  std::size_t candidates = 0;  // how many of the largest logits who steps it needs; 0: all
};

class BatchNetworks;

// An opened bundle: what all sequences of an engine share. May be used by several threads at once.
class Backend {
 public:
  // provider: "cpu", "tensorrt" or "tensorrt-rtx".
  Backend(Bundle bundle, std::string provider) : bundle_(std::move(bundle)), provider_(std::move(provider)) {}
  virtual ~Backend() = default;

  Bundle const& bundle() const { return bundle_; }
  Manifest const& manifest() const { return bundle_.manifest; }
  std::string const& provider() const { return provider_; }

  // Starts an empty sequence, which must not outlive the backend. The arguments are those of `Engine::start`, checked;
  // `room` is ignored where K/V buffers do not grow.
  virtual std::unique_ptr<Sequence> start(std::vector<float> const& thresholds, std::int64_t max_pending,
                                          std::int64_t room) = 0;

  // The networks for batches; nullptr: this backend decodes one sequence at a time.
  virtual BatchNetworks* batch_networks() { return nullptr; }

 private:
  Bundle bundle_;
  std::string provider_;
};

// Opens a bundle with the provider of `options`. Throws ProviderError: the provider is unknown or cannot run this
// bundle here, or plugins or threads are set where they have no effect. ConfigError: threads not in 1..1024. BundleError: the
// bundle is damaged.
std::shared_ptr<Backend> open_backend(Bundle bundle, LoadOptions const& options);

}  // namespace tide

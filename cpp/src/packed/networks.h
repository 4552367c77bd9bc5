// The networks for batches as ONNX Runtime sessions, opened when a batch is first requested.
//
// They hold another copy of the weights in memory (ONNX Runtime packs weights for each session), so that only one batch
// size is kept: a larger one replaces a smaller one and serves smaller batches from then on.
#pragma once


#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
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

// Sessions for batches of up to `slots` sequences. `Run` of several threads at once is safe.
struct BatchSessions {
  ReturnsFreeMemory returns_free_memory;
  Ort::Env env{"tide"};  // shared by the whole process
  std::size_t slots = 0;
  std::vector<NetworkSession> segments;  // shallowest first
  NetworkSession head;                   // takes the states that tokens exited with
  std::size_t exit_size = 0;           // width D' of these
  // By segment, for tokens that skip it: of those with K/V of their own, if K/V are propagated.
  std::map<std::size_t, NetworkSession> skipped;
};

struct ExitRule;
class KvBuffers;
class LoneSequence;

// Starts a sequence on the graph of one sequence, with these K/V buffers.
using StartLone = std::function<std::unique_ptr<LoneSequence>(ExitRule const& rule, KvBuffers& kv)>;

// The batch networks of a backend. May be used by several threads at once.
class BatchNetworks {
 public:
  // `bundle` must outlive it. threads: of one run. start_lone: how a step of one sequence runs faster than on these.
  BatchNetworks(Bundle const& bundle, std::optional<std::int64_t> threads, StartLone start_lone)
      : bundle_(bundle), threads_(threads), start_lone_(std::move(start_lone)) {}

  StartLone const& start_lone() const { return start_lone_; }

  // Sequences that can be decoded at the same time; 1: the bundle holds no networks for batches.
  std::size_t max_batch_size() const;

  // Sessions for `count` sequences, or for the maximum if there are more. Throws GenerationError: the bundle holds no
  // networks for batches. BundleError: a network does not load or does not match the manifest.
  std::shared_ptr<BatchSessions> sessions(std::size_t count);

 private:
  std::shared_ptr<BatchSessions> open(std::size_t slots) const;
  NetworkSession load(Ort::Env const& env, std::string const& name) const;
  void check(Ort::Session const& session, NetworkSpec const& spec, std::string const& name) const;

  Bundle const& bundle_;
  std::optional<std::int64_t> const threads_;
  StartLone const start_lone_;
  std::mutex mutex_;
  std::shared_ptr<BatchSessions> opened_;
};

}  // namespace tide

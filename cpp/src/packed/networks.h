// The networks of a batch as ONNX Runtime sessions, opened when a batch is first asked for.
//
// They hold their own copy of the weights in memory (ONNX Runtime packs weights for each session), so only one size of
// batch is kept: a larger one takes the place of a smaller and serves smaller batches from then on.
#pragma once

#include <onnxruntime_cxx_api.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "onnxruntime/contract.h"
#include "bundle/store.h"

namespace tide {
namespace names {

// Beside those of the networks of one segment each: N tokens of all rows behind one another, R rows at most.
constexpr char const* kPositionIds = "position_ids";  // int64 [1, N], each token's place in its own sequence
constexpr char const* kSlotTokens = "slot_tokens";      // int64 [R], how many of the N are each row's; 0: left alone
constexpr char const* kSlotLengths = "slot_lengths";    // int32 [R], tokens in its K/V after the run; 1: left alone

std::string slot(std::string const& name, std::size_t number);  // a K/V buffer of one slot
std::string skipped(std::size_t k);                     // the network for tokens that skip segment k >= 1
std::string made(std::size_t layer, char const* kind);  // of m such tokens, float32 [1, heads, m, head_dim]
std::string batch_file(std::string const& name);        // where a bundle keeps kHead's or `skipped(k)`'s
std::string batch_file(std::string const& name, std::size_t slots);  // and `segment(k)`'s of up to so many slots

}  // namespace names

constexpr char const* kKinds[] = {"key", "value"};

// Layers of one segment: first .. first + count - 1.
struct Layers {
  std::size_t first, count;
};
Layers layers_of(Manifest const& manifest, std::size_t k);

// Sessions for batches of up to `rows`. `Run` of several threads at once is safe.
struct BatchSessions {
  Ort::Env env{ORT_LOGGING_LEVEL_FATAL, "tide"};  // the whole process has one
  std::size_t rows = 0;
  std::vector<Ort::Session> segments;  // shallowest first
  Ort::Session head{nullptr};          // takes the states that tokens left with
  std::size_t exit_size = 0;           // width D' of these
  std::vector<Ort::Session> skipped;   // for tokens that skip segment 1, 2, ..; none where the K/V cache is exact
};

// What a session keeps for batches. Safe to use from several threads.
class BatchNetworks {
 public:
  // `bundle` must outlive it; `threads` are those that one run may use.
  BatchNetworks(Bundle const& bundle, std::optional<std::int64_t> threads) : bundle_(bundle), threads_(threads) {}

  // Sequences that can be decoded together; 1: the bundle holds no networks for more.
  std::size_t max_batch_size() const;

  // Sessions for `count` sequences at once, or for the most there can be. Throws GenerationError: the bundle holds no
  // networks for batches. BundleError: one of them does not load, or is not what the manifest calls for.
  std::shared_ptr<BatchSessions> sessions(std::size_t count);

 private:
  std::shared_ptr<BatchSessions> open(std::size_t rows) const;
  Ort::Session load(Ort::Env const& env, std::string const& name, TensorTypes const& inputs,
                    TensorTypes const& outputs) const;

  Bundle const& bundle_;
  std::optional<std::int64_t> const threads_;
  std::mutex mutex_;
  std::shared_ptr<BatchSessions> opened_;
};

}  // namespace tide

// Declares the interfaces of a backend, which runs an opened bundle, of one sequence on it (used by `State`), and of a batch
// (used by a scheduler). The step graph itself decides how deep a token goes (paged/step_graph.cpp); with one network per
// segment, the step decides (paged/batch.cpp, segmented/steps.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "bundle/store.h"
#include "decoding/decoder.h"
#include "decoding/drafts.h"
#include "process.h"
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
  virtual std::int64_t limit() const = 0;                        // tokens it may have, at most

  std::int64_t settled = kNoLimit;  // tokens that a rewind will not remove, but those of the next step
  std::int64_t adapter = 0;        // as `Backend::adapter` gives it
  std::size_t candidates = 0;  // how many of the largest logits who steps it needs; 0: all
  bool scores = true;          // whether who steps it alone reads the router's scores
  bool states = false;         // whether who steps it needs final states
};

// When the tokens of a sequence exit, and how many of them may be pending before a segment must run over it.
struct ExitRule {
  std::vector<float> thresholds;  // one per checkpoint, as returned by `resolve_thresholds`
  std::int64_t max_pending = 0;
};

// How far each segment has come in one sequence.
class SequenceState {
 public:
  explicit SequenceState(Manifest const& manifest)
      : lengths(manifest.checkpoints.size() + 1), manifest_(manifest) {}
  virtual ~SequenceState() = default;
  SequenceState(SequenceState const&) = delete;
  SequenceState& operator=(SequenceState const&) = delete;

  std::vector<std::int64_t> lengths;  // tokens in each segment's K/V, shallowest first; never rising with depth
  std::int64_t settled = kNoLimit;    // tokens that a rewind will not remove, but those of the next step
  std::int64_t adapter = 0;           // as `Backend::adapter` gives it
  std::int64_t cache_root = 0;        // 0 or less: those with the same one share a prefix cache
  std::size_t candidates = 0;         // how many of the largest logits who steps it needs; 0: all
  bool scores = true;                 // whether who steps it alone reads the router's scores
  bool states = false;                // whether who steps it needs final states
  bool exit_state = false;            // whether it needs what the head reads of the last position, wherever that exits

  std::int64_t length() const { return lengths[0]; }

  // Removes all tokens after the first `length`: what buffers hold beyond is overwritten before it is read. Throws
  // GenerationError: the sequence is shorter.
  virtual void rewind(std::int64_t length);

 protected:
  Manifest const& manifest_;
};

// The part of one sequence in a step.
struct SlotRequest {
  std::size_t slot;
  StepRequest const& request;
  // Whether it gets the logits of full depth if the last segment runs over it, even if the token could have exited. A
  // sequence that does not verify exits at its own checkpoint, whatever runs.
  bool verifies;
};

// May be used by one thread at a time. Must not outlive its backend.
class Batch {
 public:
  virtual ~Batch() = default;

  virtual std::size_t free_slots() const = 0;

  // Tokens of all sequences that its K/V memory holds at most, if they share it.
  virtual std::int64_t max_tokens() const { return kNoLimit; }

  // Adds an empty sequence and returns its slot. The arguments are those of `ExitRule`. Throws GenerationError: not
  // enough memory, or the device failed; nothing is changed.
  virtual std::size_t join(std::vector<double> const& thresholds, std::int64_t max_pending) = 0;

  virtual void leave(std::size_t slot) noexcept = 0;  // frees the slot of a sequence

  virtual SequenceState& sequence(std::size_t slot) = 0;

  // Runs the new tokens of some sequences, by ascending slots. The results are in the same order, without scores, and
  // valid until the next step. Throws GenerationError: no ids, more tokens than the model's context or the buffers hold,
  // not enough memory, or the engine failed; the sequences are then as before the step.
  virtual std::vector<StepResult> step(std::vector<SlotRequest> const& requests) = 0;
};

// An opened bundle: what all sequences of an engine share. May be used by several threads at once.
class Backend {
 public:
  // provider: "cpu", "cuda", "tensorrt" or "tensorrt-rtx".
  Backend(Bundle bundle, std::string provider) : bundle_(std::move(bundle)), provider_(std::move(provider)) {}
  virtual ~Backend() = default;

  Bundle const& bundle() const { return bundle_; }
  Manifest const& manifest() const { return bundle_.manifest; }
  std::string const& provider() const { return provider_; }
  Process const& process() const { return process_; }

  // Starts an empty sequence, which must not outlive the backend. The arguments are those of `Engine::start`, checked.
  virtual std::unique_ptr<Sequence> start(std::vector<float> const& thresholds, std::int64_t max_pending) = 0;

  // Starts the bundle's drafter for so many sequences; null: it has none that this backend runs. Must not outlive the
  // backend. Throws BundleError: it does not load or does not match the bundle.
  virtual std::unique_ptr<Drafts> start_drafts(std::size_t) { return nullptr; }

  // The same for a batch, whose steps give final states alone, not hidden states within segments.
  std::unique_ptr<Drafts> start_batch_drafts(std::size_t slots) {
    bool const drafts = manifest().drafter && manifest().drafter->layers.empty();
    return drafts ? start_drafts(slots) : nullptr;
  }

  // The number of a loaded adapter, 1 or more; 0: there is none of this name.
  virtual std::int64_t adapter(std::string const&) const { return 0; }

  virtual std::size_t max_batch_size() const = 0;  // sequences that a batch can have; 1: there are no batches

  // Starts an empty batch, which must not outlive the backend.
  //
  // compaction_threshold: if a smaller share of the sequences in a step than this needs a segment, only those run it;
  //     else all with pending tokens run it.
  // slots: how many it shall have; no more than `max_batch_size` are taken.
  //
  // Throws GenerationError: the bundle holds no networks for batches, or not enough memory. BundleError: a network for
  // batches does not load or does not match the manifest.
  virtual std::unique_ptr<Batch> start_batch(double compaction_threshold, std::size_t slots) = 0;

 private:
  Bundle bundle_;
  std::string provider_;
  Process process_;
};

// Opens a bundle with the provider of `options`. Throws ProviderError: the provider is unknown or cannot run this
// bundle here, or plugins or threads are set where they have no effect. ConfigError: threads not in 1..1024. BundleError: the
// bundle is damaged.
std::shared_ptr<Backend> open_backend(Bundle bundle, LoadOptions const& options);

}  // namespace tide

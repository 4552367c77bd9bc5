// Declares the interfaces of a backend, which runs an opened bundle, and of a batch of sequences on it: one of a stream or a
// `State`, several of a list or a scheduler. A step decides after every segment how deep each token goes, by
// decoding/depth_rule.h: on pages of the host's memory (paged/batch.cpp) or on a device's buffers (segmented/batch.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "bundle/store.h"
#include "decoding/decoder.h"
#include "decoding/drafts.h"
#include "decoding/shared_drafting.h"
#include "measured_costs.h"
#include "process.h"
#include "tide/runtime.h"

namespace tide {

// When the tokens of a sequence exit, and how many of them may be pending before a segment must run over it.
struct ExitRule {
  std::vector<float> thresholds;  // one per checkpoint, as returned by `resolve_thresholds`
  std::int64_t max_pending = 0;
};

// How far each segment has come in one sequence, and what its steps are to give.
class Sequence {
 public:
  Sequence(Manifest const& manifest, ExitRule exit_rule)
      : lengths(manifest.checkpoints.size() + 1), rule(std::move(exit_rule)), manifest_(manifest) {}
  virtual ~Sequence() = default;
  Sequence(Sequence const&) = delete;
  Sequence& operator=(Sequence const&) = delete;

  std::vector<std::int64_t> lengths;  // tokens in each segment's K/V, shallowest first; never rising with depth
  ExitRule rule;
  std::int64_t settled = kNoLimit;    // tokens that a rewind will not remove, but those of the next step
  std::int64_t adapter = 0;           // as `Backend::adapter` gives it
  std::int64_t cache_root = 0;        // 0 or less: those with the same one share a prefix cache
  std::size_t candidates = 0;         // of the largest logits that results need; 0: all
  bool scores = false;                // whether results have the routers' scores, where it is the only one of a step
  bool states = false;                // whether they have what the head reads of all tokens the last segment runs over
  bool draft_states = false;          // or in its place what the drafter reads of these
  bool exit_state = false;            // whether they have what the head reads of the last token, wherever that exits

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
  bool verifies = false;
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

  virtual Sequence& sequence(std::size_t slot) = 0;

  // Runs the new tokens of some sequences, by ascending slots. The results are in the same order, and valid until the
  // next step. Throws GenerationError: no ids, more tokens than the model's context or the buffers hold,
  // not enough memory, or the engine failed; the sequences are then as before the step.
  virtual std::vector<StepResult> step(std::vector<SlotRequest> const& requests) = 0;
};

// An opened bundle: what all sequences of an engine share. May be used by several threads at once.
class Backend {
 public:
  // provider: "cpu", "cuda", "tensorrt" or "tensorrt-rtx".
  Backend(Bundle bundle, std::string provider) : bundle_(std::move(bundle)), provider_(std::move(provider)) {}
  virtual ~Backend() {
    if (process_.is_this()) costs_.save();
  }

  Bundle const& bundle() const { return bundle_; }
  Manifest const& manifest() const { return bundle_.manifest; }
  std::string const& provider() const { return provider_; }
  Process const& process() const { return process_; }
  MeasuredCosts& costs() { return costs_; }  // of its steps
  DraftRecord& draft_record() { return draft_record_; }

  // Starts the bundle's drafter for so many sequences of `batch`, whose K/V it may read; null: it has none that this
  // backend runs. Must not run after the batch, nor outlive the backend. Throws BundleError: it does not load or does not match
  // the bundle.
  virtual std::unique_ptr<Drafts> start_drafts(std::size_t, Batch&) { return nullptr; }

  // The number of a loaded adapter, 1 or more; 0: there is none of this name.
  virtual std::int64_t adapter(std::string const&) const { return 0; }

  virtual std::size_t max_batch_size() const = 0;  // sequences that a batch can have

  // Starts an empty batch, which must not outlive the backend.
  //
  // compaction_threshold: if a smaller share of the sequences in a step than this needs a segment, only those run it;
  //     else all with pending tokens run it.
  // slots: how many it shall have; no more than `max_batch_size` are taken.
  //
  // Throws GenerationError: not enough memory.
  virtual std::unique_ptr<Batch> start_batch(double compaction_threshold, std::size_t slots) = 0;

 private:
  Bundle bundle_;
  std::string provider_;
  Process process_;
  MeasuredCosts costs_;
  DraftRecord draft_record_;
};

// Opens a bundle with the provider of `options`. Throws ProviderError: the provider is unknown or cannot run this
// bundle here, or plugins or threads are set where they have no effect. ConfigError: threads not in 1..1024. BundleError: the
// bundle is damaged.
std::shared_ptr<Backend> open_backend(Bundle bundle, LoadOptions const& options);

}  // namespace tide

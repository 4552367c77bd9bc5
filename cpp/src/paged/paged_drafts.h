// Runs a bundle's drafter, a small network that proposes the next token from the last token and the final hidden state before
// it (formula: tide_export/routers/drafter_weights.py). Its K/V are in separate pages; or it has none, and reads the model's.
// One that drafts a block (formula: tide_export/drafting/heads/dflash.py) runs over the block after a sequence's rows, and its
// K/V of the block are overwritten.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "decoding/drafts.h"
#include "onnxruntime/session.h"
#include "paged/batch.h"
#include "paged/pool.h"
#include "paged/run.h"

namespace tide {

// The network and the pool of its own K/V, if any. May be used by several threads at once.
class DrafterNetwork {
 public:
  // Throws BundleError: it does not load, or is not one for the bundle's model. GenerationError: no memory can be reserved.
  DrafterNetwork(Bundle const& bundle, std::optional<std::int64_t> threads);

  DraftsInfo const& info() const { return info_; }

 private:
  friend class PagedDrafts;

  ReturnsFreeMemory returns_free_memory_;
  Ort::Env env_{"tide"};
  NetworkSession session_;
  Manifest manifest_;  // of its own layers, for its sequences and pages; or the model's
  std::vector<std::size_t> read_, written_;  // layers whose pages it reads and writes
  DraftsInfo info_;
  std::optional<PagePool> pool_;  // none: it reads the model's
};

// The drafter's sequences of one stream or batch, and its bindings for them.
class PagedDrafts final : public Drafts {
 public:
  // `batch` must be there while it runs: its sequences are in the same slots.
  PagedDrafts(DrafterNetwork& network, std::size_t slots, PagedBatch& batch);

  DraftsInfo const& info() const override { return network_.info(); }
  std::vector<DraftResult> run(std::vector<SlotDraft> const& drafts) override;
  void leave(std::size_t slot) noexcept override { sequences_[slot].reset(); }

 private:
  DrafterNetwork& network_;
  PagedBatch& batch_;
  Ort::MemoryInfo const memory_ = Ort::MemoryInfo::cpu();
  Ort::RunOptions const run_options_;
  Ort::IoBinding binding_;
  SequenceInputs inputs_;
  std::vector<std::unique_ptr<PagedSequence>> sequences_;  // by slot; null: it has no rows
  std::vector<std::int64_t> ids_;
  std::vector<float> hidden_, logits_, next_hidden_;
};

}  // namespace tide

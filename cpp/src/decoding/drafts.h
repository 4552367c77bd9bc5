// Declares the interface of a decoder and a drafter: rows to run, and the logits and hidden states of the last one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tide/manifest.h"

namespace tide {

// What a decoder needs to know of a bundle's drafter.
struct DraftsInfo {
  std::vector<std::int64_t> tokens;  // that it can propose, ascending
  std::vector<double> acceptance;    // share of its drafts that was accepted in training, by confidence
  std::int64_t max_rows = 0;         // of a sequence
  std::size_t width = 0;             // of a token's hidden states
  bool catches_up = true;            // runs over all tokens; false: over the last one, with the model's K/V
  std::int64_t block_size = 0;       // drafts so many tokens less one in one run; 0: one token

  std::size_t drafts_of_run() const { return block_size > 0 ? static_cast<std::size_t>(block_size) - 1 : 1; }
};

DraftsInfo drafts_info(DrafterInfo const& drafter);

// Rows that the drafter is to run over in one sequence: tokens, each with the hidden states before it.
struct DraftRows {
  std::int64_t before = 0;        // rows of the sequence that stay; later ones are removed
  std::vector<std::int64_t> ids;  // [n], at least one
  std::vector<float> hidden;      // [n, width]
};

// Of the last row; valid until the next run.
struct DraftResult {
  float const* logits;  // [drafts_of_run, tokens]
  float const* hidden;  // [width], in place of the model's for a further row; null: it drafts a block
};

struct SlotDraft {
  std::size_t slot;
  DraftRows const& rows;
};

// Sequences of a drafter, in slots. May be used by one thread at a time.
class Drafts {
 public:
  virtual ~Drafts() = default;

  virtual DraftsInfo const& info() const = 0;

  // Runs rows of some sequences, one slot at most once; a slot without rows so far begins anew. Throws GenerationError: not
  // enough memory, or the network failed; the rows of a slot are then those before.
  virtual std::vector<DraftResult> run(std::vector<SlotDraft> const& drafts) = 0;

  virtual void leave(std::size_t slot) noexcept = 0;  // removes the rows of a slot
};

}  // namespace tide

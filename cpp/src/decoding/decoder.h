// Turns steps into tokens, independent of what runs the steps: `TokenStream` on one sequence, `StepLoop` for all
// decoders of a batch at once. One decoder yields a token per step; the lossless decoder drafts and verifies.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "decoding/draft_costs.h"
#include "decoding/sampling.h"
#include "tide/runtime.h"

namespace tide {

class Audit;
struct SharedDrafting;
struct DraftResult;
struct DraftRows;
struct DraftsInfo;
struct Request;

// A step that a decoder requests: the arguments of `State::step`.
struct StepRequest {
  std::vector<std::int64_t> ids;
  std::int64_t logits_to_keep = 1;
  bool full = false;
  std::vector<float> thresholds = {};  // in place of the sequence's; empty: these
};

// Who drafts: an early exit, the bundle's drafter, prompt lookup, or answers to earlier requests.
enum class DraftSource : std::size_t { exit, learned, lookup, answers };

// Drafts so far.
struct DraftCounts {
  struct Of {
    std::int64_t drafted = 0, accepted = 0;
    double saved = 0;  // steps: one for each that was accepted, less what making and verifying all of them cost
  };

  std::array<Of, 4> by_source;
  double spent = 0;  // steps: what tokens after the first cost, drafts included

  Of& of(DraftSource source) { return by_source[static_cast<std::size_t>(source)]; }
  Of const& of(DraftSource source) const { return by_source[static_cast<std::size_t>(source)]; }
};

// Chooses the tokens of one sequence, which starts empty and runs only the steps requested here.
class Decoder {
 public:
  // depths: layers run at the end of each segment.
  Decoder(Sampler sampler, std::vector<std::int64_t> depths) : sampler_(std::move(sampler)), depths_(std::move(depths)) {}
  virtual ~Decoder() = default;

  // Begins a block: the next 1 to `max_tokens` tokens after `ids`, which the sequence has not run yet (the prompt, or
  // the last token).
  void begin(std::vector<std::int64_t> const& ids, std::int64_t max_tokens) {
    settled_ = length_;
    if (length_ == 0) sampler_.begin(ids);
    begin_block(ids, max_tokens);
  }

  // Takes note of what the next step runs beside this sequence.
  void run_beside(Company const& others) { others_ = others; }

  // Whether the bundle's drafter shall draft the next token, if it runs for so many sequences at once.
  virtual bool asks_drafter(std::size_t) const { return false; }

  // The rows that it is to run over, where it is asked. Where it throws nothing has changed.
  virtual DraftRows const& draft_rows();

  // Takes its result, of a run for `sharing` sequences. Where it throws nothing has changed.
  virtual void take_draft(DraftResult const&, std::size_t sharing);

  // Drafts that the next step verifies, as far as they are made.
  virtual std::size_t planned() const { return 0; }

  // The step to run next, for which no more is drafted. Where it throws nothing has changed.
  virtual StepRequest const& request() { return request_; }

  // Whether it reads the final hidden states of steps.
  virtual bool reads_hidden() const { return false; }

  // Takes the hidden states of a step, before `take`; of a request that is run in parts, of each part. exits: in place of those
  // before, that which the last token exited with.
  void read_hidden(StepResult const& result, bool exits) {
    if (exits) return hidden_.assign(result.exit_state, result.exit_state + result.state_width);
    hidden_.insert(hidden_.end(), result.states, result.states + result.state_rows * result.state_width);
  }

  // The hidden states that were read since the last call.
  std::vector<float> take_hidden() { return std::exchange(hidden_, {}); }

  // Takes the step's result. Returns the block's tokens; empty if another step is requested. Where it throws nothing has
  // changed: it may be called again with the same result.
  virtual std::vector<Token> take(StepResult const& result) = 0;

  // Tokens that the sequence shall have now; it is to be rewound to that, which removes rejected drafts.
  std::int64_t length() const { return length_; }

  // Whether a step that runs the last segment must return the logits of full depth, even if the token could have exited
  // and the segment ran for the sake of others.
  virtual bool verifies() const { return false; }

  std::int64_t settled() const { return settled_; }  // tokens before the block, which no rewind removes
  std::size_t candidates() const { return sampler_.candidates(); }
  DraftCounts const& counts() const { return counts_; }

 protected:
  virtual void begin_block(std::vector<std::int64_t> const& ids, std::int64_t max_tokens) = 0;

  // Layers that a step ran for its new tokens.
  std::int64_t passes(StepResult const& result) const {
    return depths_[static_cast<std::size_t>(result.segments_run - 1)];
  }

  Sampler sampler_;
  std::vector<std::int64_t> const depths_;
  StepRequest request_;
  Company others_;  // what the next step runs beside this sequence
  DraftCounts counts_;
  std::int64_t length_ = 0, settled_ = 0;
  std::vector<float> hidden_;  // of tokens that steps ran over, in their order
};

// The decoder of a request's prompt of this number. In lossless mode the sequence must be started with kNoLimit as
// `max_pending`: the decoder decides when to verify.
//
// shared: of what is decoded together. audit: of mode exit; null: none. drafter: of the bundle, which outlives it; null: none.
std::unique_ptr<Decoder> make_decoder(Manifest const& manifest, Request& request, std::size_t number,
                                      std::shared_ptr<Audit> const& audit, DraftsInfo const* drafter,
                                      std::shared_ptr<SharedDrafting> const& shared);

}  // namespace tide

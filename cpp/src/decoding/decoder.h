// Turns steps into tokens, independent of what runs the steps: `TokenStream` on one sequence, `StepLoop` for all
// decoders of a batch at once. One decoder yields a token per step; the lossless decoder drafts and verifies.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "decoding/draft_costs.h"
#include "tide/runtime.h"

namespace tide {

class Audit;
struct Balances;
struct DraftResult;
struct DraftRows;
struct DraftsInfo;
struct Request;

// A step that a decoder requests: the arguments of `State::step`.
struct StepRequest {
  std::vector<std::int64_t> ids;
  std::int64_t logits_to_keep = 1;
  bool full = false;
};

// Chooses the tokens of one sequence, which starts empty and runs only the steps requested here.
class Decoder {
 public:
  virtual ~Decoder() = default;

  // Begins a block: the next 1 to `max_tokens` tokens after `ids`, which the sequence has not run yet (the prompt, or
  // the last token).
  virtual void begin(std::vector<std::int64_t> const& ids, std::int64_t max_tokens) = 0;

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

  // Whether it reads the final states of steps.
  virtual bool reads_states() const { return keeps_states; }

  // Takes the states of a step, before `take`; of a request that is run in parts, of each part.
  void read_states(StepResult const& result) {
    if (keeps_exit_states) return states_.assign(result.exit_state, result.exit_state + result.state_width);
    states_.insert(states_.end(), result.states, result.states + result.state_rows * result.state_width);
  }

  // The states that were read since the last call.
  std::vector<float> take_states() { return std::exchange(states_, {}); }

  // Takes the step's result. Returns the block's tokens; empty if another step is requested. Where it throws nothing has
  // changed: it may be called again with the same result.
  virtual std::vector<Token> take(StepResult const& result) = 0;

  // Tokens that the sequence shall have now; it is to be rewound to that, which removes rejected drafts.
  std::int64_t length() const { return length_; }

  // Whether a step that runs the last segment must return the logits of full depth, even if the token could have exited
  // and the segment ran for the sake of others.
  virtual bool verifies() const { return false; }

  std::int64_t drafted = 0, accepted = 0;                // drafts made, drafts accepted
  std::int64_t lookup_drafted = 0, lookup_accepted = 0;  // of these, prompt-lookup drafts
  std::int64_t learned_drafted = 0, learned_accepted = 0;  // of these, drafts of the bundle's drafter
  bool keeps_states = false;    // whether the generation is to have its final states
  bool keeps_exit_states = false;  // or those that its tokens exited with
  Company others;               // what the next step runs beside this sequence
  std::int64_t settled = 0;                              // tokens before the block, which no rewind removes
  std::int64_t undone = 0;                               // positions that every layer computed and a rewind removed
  std::size_t candidates = 0;                            // see `Sampler::candidates`

 protected:
  StepRequest request_;
  std::int64_t length_ = 0;
  std::vector<float> states_;  // of tokens that steps ran over, in their order
};

// The decoder of a request's prompt of this number. In lossless mode the sequence must be started with kNoLimit as
// `max_pending`: the decoder decides when to verify.
//
// audit: of mode exit; null: none. drafter: of the bundle, which outlives it; null: none. balances: of what is decoded
// together; null: of this sequence alone.
std::unique_ptr<Decoder> make_decoder(Manifest const& manifest, Request& request, std::size_t number,
                                      std::shared_ptr<Audit> const& audit = nullptr,
                                      DraftsInfo const* drafter = nullptr,
                                      std::shared_ptr<Balances> const& balances = nullptr);

}  // namespace tide

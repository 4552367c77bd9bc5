// Holds one request of a scheduler: its decoder, its tokens so far, and where it stands.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "sequence.h"
#include "decoding/decoder.h"
#include "decoding/generation.h"
#include "decoding/prompt_scores.h"
#include "request.h"

namespace tide {

// A request from its submission to its end.
class Job {
 public:
  // request: of `number` prompts or more, which several jobs may share.
  // deadline: by `seconds_now`, when it is cancelled.
  // on_token: as in `Engine::stream`, or nullptr.
  Job(Manifest const& manifest, std::vector<std::int64_t> const& prompt, std::shared_ptr<Request> request,
      std::size_t number, std::optional<double> deadline, std::function<bool(Token const&)> on_token);

  Request const& request() const { return *request_; }
  Process const& process() const { return process_; }
  std::int64_t reserved() const { return reserved_; }  // tokens of K/V that it may need
  bool has_deadline() const { return deadline_.has_value(); }
  bool expired(double now) const { return deadline_ && now >= *deadline_; }

  // --- called by who does the steps -----------------------------------------------------------------------------------

  // Takes over an empty sequence, which stays until the job's end. audit: of mode exit; null: none. drafter, shared: as
  // in `make_decoder`.
  void begin(Sequence& sequence, std::shared_ptr<Audit> const& audit, DraftsInfo const* drafter,
             std::shared_ptr<SharedDrafting> const& shared);

  // Omits the first `count` tokens of the prompt, whose K/V the sequence has, from the first step.
  void skip(std::int64_t count);

  // The next step, over at most `limit` tokens where it is a prompt's; nullptr: `limit` leaves nothing. Valid until
  // `take`.
  //
  // full: a step that leaves some of the prompt runs every segment.
  StepRequest const* next_step(std::int64_t limit, bool full);

  // Continues with the result of the step of `next_step`, which took `seconds`. Returns whether the generation has ended.
  // Where it throws it may be called again with the same result: it goes on from there.
  bool take(StepResult const& result, double seconds);

  // Ends the job and frees what it has in its slot: a caller may keep the handle for long. reason: in place of that of
  // the generation. error: why it failed.
  void end(std::optional<FinishReason> reason, std::exception_ptr error) noexcept;

  std::int64_t left() const { return request_->max_new_tokens - static_cast<std::int64_t>(tokens_.size()); }  // at most
  bool unread() const { return sequence_->length() == 0; }  // whether its sequence is empty
  bool reads_prompt() const { return reads_prompt_; }       // whether it has no token yet
  bool scores_prompt() const { return scores_ && !scores_->done(); }  // whether the next step is for log-probabilities
  bool verifies() const { return scores_prompt() || decoder_->verifies(); }
  Decoder& decoder() const { return *decoder_; }

  std::vector<std::int64_t> const& prompt() const { return prompt_; }
  std::vector<Token> const& tokens() const { return tokens_; }  // so far
  std::vector<std::int64_t> text() const;                       // the prompt, and these

  std::int64_t number = 0;  // by arrival

  // --- called by any thread -------------------------------------------------------------------------------------------

  std::atomic<bool> cancelled{false};  // whether it shall end before the next step

  bool ready(std::size_t read) const;  // whether there are more than `read` tokens, or no more will come
  // Until then, or until so many seconds have passed.
  void wait(std::size_t read, std::optional<double> seconds) const;

  // Writes at most `room` tokens from number `from` on, and returns how many.
  std::size_t read(std::size_t from, std::int64_t* ids, std::size_t room) const;

  bool ended() const { return ready(static_cast<std::size_t>(kNoLimit)); }
  bool finished(std::size_t read) const;  // whether it has ended with so many tokens

  // The token of this number; none: it has ended. Throws what it failed with. The job is `ready`.
  std::optional<Token> token(std::size_t number) const;

  // The text from byte `from` on, without a possible start of a stop string.
  std::string shown(std::size_t from) const;

  Generation generation() const;  // so far
  Generation finished();          // once it has ended; called once
  std::optional<FinishReason> finish_reason() const;
  std::exception_ptr error() const;
  std::int64_t cached_tokens() const;  // of the prompt

 private:
  void end_step();
  void take_block();
  bool is_ready(std::size_t read) const { return ended_ || tokens_.size() > read; }

  Process const process_;
  std::vector<std::int64_t> const prompt_;
  std::shared_ptr<Request> const request_;
  std::int64_t const reserved_;
  std::optional<double> const deadline_;
  std::function<bool(Token const&)> const on_token_;

  Manifest const& manifest_;  // which outlives the steps
  std::size_t const number_;  // of the prompt of its request
  std::unique_ptr<Decoder> decoder_;  // while it has a slot
  std::optional<PromptScores> scores_;  // where the prompt's log-probabilities are asked for
  Sequence* sequence_ = nullptr;
  StepRequest part_;         // of the decoder's request, if it is divided
  std::size_t stepped_ = 0;  // tokens of the decoder's request that steps have run over
  std::size_t count_ = 0;    // tokens of the present step
  double seconds_ = 0;       // that the steps of the block took so far
  bool reads_prompt_ = true;
  // What `take` goes on with, where it threw.
  bool begun_ = true;                        // whether the decoder has begun the next block
  bool read_ = false;                        // whether the hidden states of the result are read
  std::optional<std::vector<Token>> block_;  // that is chosen, and is not yet part of the generation

  mutable std::mutex mutex_;  // of all that follows
  mutable std::condition_variable changed_;
  Progress progress_;
  std::vector<Token> tokens_;
  bool ended_ = false;
  std::exception_ptr error_;
};

}  // namespace tide

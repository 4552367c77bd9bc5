// Collects the tokens and statistics of a generation and decides when it ends, for one sequence and for batches.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "decoding/decoder.h"
#include "request.h"
#include "text/generated_text.h"
#include "tide/runtime.h"

namespace tide {

// A generation in progress, which grows block by block.
class Progress {
 public:
  // `request` must outlive it.
  Progress(Manifest const& manifest, std::vector<std::int64_t> const& prompt, Request const& request);

  bool ended() const { return ended_; }

  // Of the prompt, whose K/V come from a prefix cache: the statistics count nothing as run for them.
  std::int64_t cached_tokens = 0;

  // The tokens that the sequence has not run yet: the prompt, or the last token.
  std::vector<std::int64_t> const& next_ids() const { return next_ids_; }

  // Begins the next block. Where it throws, it is to be called again.
  void begin(Decoder& decoder) const {
    decoder.begin(next_ids_, request_.max_new_tokens - generation_.stats.total_tokens());
  }

  // Adds a block's tokens, up to one that ends the generation, and calls `on_token` with each. Returns how many. Where it
  // throws, nothing has changed.
  //
  // lengths: tokens in each segment's K/V. seconds: that the block took.
  std::size_t take(std::vector<Token> const& block, Decoder& decoder, std::vector<std::int64_t> const& lengths,
            double seconds, std::function<bool(Token const&)> const& on_token);

  // Takes the log-probabilities of the prompt's tokens.
  void take(std::vector<PromptToken> prompt) { generation_.prompt_logprobs = std::move(prompt); }

  // Ends it after the last token; its text is then complete.
  void finish(FinishReason reason);

  // Its text from byte `from` on, without what may become a stop string, until it has ended.
  std::string text_from(std::size_t from) const;

  // A copy, with that text.
  Generation so_far() const;

  FinishReason finish_reason() const { return generation_.finish_reason; }  // once it has ended

  // The generation, once it has ended.
  Generation finished() { return std::move(generation_); }

 private:
  std::vector<std::int64_t> const depths_;
  std::optional<std::int64_t> const context_;
  Request const& request_;
  std::vector<std::int64_t> next_ids_;
  Generation generation_;
  std::optional<GeneratedText> text_;  // where there is a detokenizer
  bool ended_ = false;
};

}  // namespace tide

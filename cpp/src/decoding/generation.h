// How a generation grows and when it ends: shared by one sequence (`engine`) and several (`batch/generate`).
#pragma once

#include <functional>
#include <optional>
#include <set>
#include <vector>

#include "decoding/decoder.h"
#include "tide/runtime.h"

namespace tide {

// A generation that grows block by block.
class Progress {
 public:
  // `stops`, the tokens that end it, must outlive it.
  Progress(Manifest const& manifest, std::vector<std::int64_t> const& prompt, std::int64_t most,
           std::set<std::int64_t> const& stops);

  bool ended() const { return ended_; }

  // What the sequence has not seen: the prompt, or the last token.
  std::vector<std::int64_t> const& next_ids() const { return next_ids_; }

  // Begins the steps to the next tokens.
  void begin(Decoder& decoder) const { decoder.begin(next_ids_, most_ - made_.stats.total_tokens()); }

  // Hands out a block's tokens, up to one that ends the generation. `computed` are the sequence's since, `seconds`
  // those that the block took.
  void take(std::vector<Token> const& block, Decoder const& decoder, std::vector<std::int64_t> const& computed,
            double seconds, std::function<bool(Token const&)> const& on_token);

  // All of it, once it has ended.
  Generation finished() { return std::move(made_); }

 private:
  void end(FinishReason reason);

  std::vector<std::int64_t> const depths_;
  std::optional<std::int64_t> const context_;
  std::int64_t const most_;
  std::set<std::int64_t> const& stops_;
  std::vector<std::int64_t> next_ids_;
  Generation made_;
  bool ended_ = false;
};

}  // namespace tide

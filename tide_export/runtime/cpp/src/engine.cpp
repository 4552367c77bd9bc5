// The runtime's front door. An engine holds what all sequences share; all that belongs to one generation lives on its
// caller's stack, so any number of threads may generate at once.
#include <algorithm>
#include <chrono>

#include "decoding.h"
#include "request.h"
#include "sampling.h"
#include "session.h"
#include "text.h"
#include "tide/runtime.h"

namespace tide {
namespace {

// A generation that grows block by block.
class Progress {
 public:
  Progress(Manifest const& manifest, std::vector<std::int64_t> const& prompt, std::int64_t most,
           std::set<std::int64_t> stops)
      : depths_(manifest.depths()),
        context_(manifest.model.context_length),
        most_(most),
        stops_(std::move(stops)),
        next_ids_(prompt) {
    made_.stats.checkpoints = manifest.checkpoints;
    made_.stats.num_layers = manifest.model.num_layers;
    made_.stats.prompt_tokens = static_cast<std::int64_t>(prompt.size());
  }

  bool ended() const { return ended_; }

  std::vector<Token> block(Decoder& decoder) { return decoder.block(next_ids_, most_ - made_.stats.total_tokens()); }

  // Hands out a block's tokens, up to one that ends the generation; `computed` are the sequence's since.
  void take(std::vector<Token> const& block, Decoder const& decoder, std::vector<std::int64_t> const& computed,
            double seconds, std::function<bool(Token const&)> const& on_token) {
    ExitStats& stats = made_.stats;
    (made_.tokens.empty() ? stats.prefill_seconds : stats.decode_seconds) += seconds;
    stats.drafted = decoder.drafted;
    stats.accepted = decoder.accepted;
    stats.looked_up = decoder.looked_up;
    stats.lookups_accepted = decoder.lookups_accepted;
    stats.layer_tokens_run = decoder.undone * stats.num_layers;
    for (std::size_t k = 0; k < depths_.size(); ++k) {
      stats.layer_tokens_run += computed[k] * (depths_[k] - (k == 0 ? 0 : depths_[k - 1]));
    }
    stats.layer_tokens_total = stats.num_layers * computed[0];
    for (Token const& token : block) {
      made_.tokens.push_back(token.id);
      stats.exit_layer.push_back(token.exit_layer);
      stats.layers_run.push_back(token.layers_run);
      bool const wanted = !on_token || on_token(token);
      if (stops_.count(token.id) == 1) return end(FinishReason::stop);
      if (stats.total_tokens() == most_) return end(FinishReason::length);
      if (!wanted) return end(FinishReason::cancelled);
    }
    if (computed[0] == context_) end(FinishReason::context);  // the last token has no place left to be read from
    next_ids_ = {made_.tokens.back()};
  }

  Generation finished() { return std::move(made_); }

 private:
  void end(FinishReason reason) {
    made_.finish_reason = reason;
    ended_ = true;
  }

  std::vector<std::int64_t> const depths_;
  std::optional<std::int64_t> const context_;
  std::int64_t const most_;
  std::set<std::int64_t> const stops_;
  std::vector<std::int64_t> next_ids_;
  Generation made_;
  bool ended_ = false;
};

}  // namespace

std::string_view name_of(FinishReason reason) {
  switch (reason) {
    case FinishReason::stop:
      return "stop";
    case FinishReason::length:
      return "length";
    case FinishReason::context:
      return "context";
    case FinishReason::cancelled:
      break;
  }
  return "cancelled";
}

Engine::Engine(std::shared_ptr<Session> session) : session_(std::move(session)) {}

Engine Engine::load(std::filesystem::path const& bundle, LoadOptions const& options) {
  return Engine(open_session(open_bundle(bundle, options.verify), options));
}

Manifest const& Engine::manifest() const { return session_->manifest(); }

Generation Engine::generate(std::vector<std::int64_t> const& prompt, Request const& request) const {
  return stream(prompt, request, nullptr);
}

Generation Engine::stream(std::vector<std::int64_t> const& prompt, Request const& request,
                          std::function<bool(Token const&)> const& on_token) const {
  check_prompt(manifest(), prompt);
  std::int64_t const most = whole_number("max_new_tokens", request.max_new_tokens, 1);
  std::vector<double> const thresholds = resolve_thresholds(manifest(), request);
  std::optional<DraftLimits> const drafts = draft_limits(session_->bundle(), request);
  // A decoder that drafts says itself when to verify.
  std::int64_t const waiting = drafts ? kNoLimit : waiting_limit(manifest(), request.max_pending);
  Sampler sampler(request);
  check_sampling(request);
  check_exits(session_->bundle(), request);
  std::set<std::int64_t> const stops = stops_of(manifest(), request);
  State state = start(thresholds, waiting);
  std::unique_ptr<Decoder> const decoder = make_decoder(manifest(), state, sampler, drafts, stops);
  Progress progress(manifest(), prompt, most, stops);
  while (!progress.ended()) {
    auto const started = std::chrono::steady_clock::now();
    std::vector<Token> const block = progress.block(*decoder);
    std::chrono::duration<double> const seconds = std::chrono::steady_clock::now() - started;
    progress.take(block, *decoder, state.computed(), seconds.count(), on_token);
  }
  return progress.finished();
}

State Engine::start(std::vector<double> const& thresholds, std::optional<std::int64_t> max_pending,
                    std::int64_t room) const {
  check_thresholds(manifest(), thresholds);
  std::int64_t const spare = std::min(whole_number("room", room, 0), kNoLimit);
  std::int64_t const waiting = waiting_limit(manifest(), max_pending);
  try {
    return State(session_, thresholds, waiting, spare);
  } catch (TideError const&) {
    throw;
  } catch (std::exception const& error) {  // ONNX Runtime's, or no memory
    throw GenerationError("cannot start a sequence: " + first_line(error));
  }
}

}  // namespace tide

#include "decoding/generation.h"

namespace tide {

Progress::Progress(Manifest const& manifest, std::vector<std::int64_t> const& prompt, Request const& request)
    : depths_(manifest.depths()), context_(manifest.model.context_length), request_(request), next_ids_(prompt) {
  generation_.stats.checkpoints = manifest.checkpoints;
  generation_.stats.num_layers = manifest.model.num_layers;
  generation_.stats.prompt_tokens = static_cast<std::int64_t>(prompt.size());
  if (!request.detokenizer) return;
  text_.emplace(request.detokenizer, prompt, request.stop);
  generation_.text.emplace();
}

void Progress::take(std::vector<Token> const& block, Decoder const& decoder, std::vector<std::int64_t> const& computed,
                    double seconds, std::function<bool(Token const&)> const& on_token) {
  ExitStats& stats = generation_.stats;
  (generation_.tokens.empty() ? stats.prefill_seconds : stats.decode_seconds) += seconds;
  stats.drafted = decoder.drafted;
  stats.accepted = decoder.accepted;
  stats.lookup_drafted = decoder.lookup_drafted;
  stats.lookup_accepted = decoder.lookup_accepted;
  stats.layer_tokens_run = decoder.undone * stats.num_layers;
  for (std::size_t k = 0; k < depths_.size(); ++k) {
    stats.layer_tokens_run += (computed[k] - cached_tokens) * (depths_[k] - (k == 0 ? 0 : depths_[k - 1]));
  }
  stats.layer_tokens_total = stats.num_layers * (computed[0] - cached_tokens);
  for (Token const& token : block) {
    generation_.tokens.push_back(token.id);
    stats.exit_layer.push_back(token.exit_layer);
    stats.layers_run.push_back(token.layers_run);
    if (token.logprobs) generation_.logprobs.push_back(*token.logprobs);
    bool const stops = text_ && text_->push(token.id, *generation_.text);
    bool const wanted = !on_token || on_token(token);
    if (stops || request_.stop_token_ids.count(token.id) == 1) return finish(FinishReason::stop);
    if (stats.total_tokens() == request_.max_new_tokens) return finish(FinishReason::length);
    if (!wanted) return finish(FinishReason::cancelled);
  }
  if (computed[0] == context_) finish(FinishReason::context);  // no step can run over the last token
  next_ids_ = {generation_.tokens.back()};
}

void Progress::finish(FinishReason reason) {
  if (text_) text_->finish(*generation_.text);
  generation_.finish_reason = reason;
  ended_ = true;
}

Generation Progress::so_far() const {
  Generation made = generation_;
  if (text_ && !ended_) made.text->resize(text_->certain(*made.text));
  return made;
}

}  // namespace tide

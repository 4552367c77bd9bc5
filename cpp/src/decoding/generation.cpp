#include "decoding/generation.h"

#include "room.h"

namespace tide {
namespace {

void count_drafts(DraftCounts const& counts, ExitStats& stats) {
  DraftCounts::Of const &exits = counts.of(DraftSource::exit), &learned = counts.of(DraftSource::learned),
                        &lookup = counts.of(DraftSource::lookup), &answers = counts.of(DraftSource::answers);
  stats.drafted = exits.drafted + learned.drafted + lookup.drafted + answers.drafted;
  stats.accepted = exits.accepted + learned.accepted + lookup.accepted + answers.accepted;
  stats.lookup_drafted = lookup.drafted;
  stats.lookup_accepted = lookup.accepted;
  stats.learned_drafted = learned.drafted;
  stats.learned_accepted = learned.accepted;
  stats.answers_drafted = answers.drafted;
  stats.answers_accepted = answers.accepted;
  double const step = counts.spent > 0 ? stats.decode_seconds / counts.spent : 0;  // seconds
  stats.exit_saved_seconds = exits.saved * step;
  stats.lookup_saved_seconds = lookup.saved * step;
  stats.learned_saved_seconds = learned.saved * step;
  stats.answers_saved_seconds = answers.saved * step;
}

}  // namespace

Progress::Progress(Manifest const& manifest, std::vector<std::int64_t> const& prompt, Request const& request)
    : depths_(manifest.depths()), context_(manifest.model.context_length), request_(request), next_ids_(prompt) {
  generation_.stats.checkpoints = manifest.checkpoints;
  generation_.stats.num_layers = manifest.model.num_layers;
  generation_.stats.prompt_tokens = static_cast<std::int64_t>(prompt.size());
  if (!request.detokenizer) return;
  text_.emplace(request.detokenizer, prompt, request.stop);
  generation_.text.emplace();
}

std::size_t Progress::take(std::vector<Token> const& block, Decoder& decoder,
                           std::vector<std::int64_t> const& lengths, double seconds,
                           std::function<bool(Token const&)> const& on_token) {
  if (request_.states) {
    std::vector<float> const hidden = decoder.take_hidden();
    generation_.states.insert(generation_.states.end(), hidden.begin(), hidden.end());
  }
  ExitStats& stats = generation_.stats;
  std::optional<GeneratedText> text = text_;
  std::optional<std::string> shown = generation_.text;
  std::vector<TokenLogprobs> logprobs;
  std::optional<FinishReason> reason;
  std::size_t count = 0;
  while (count < block.size() && !reason) {
    Token const& token = block[count++];
    if (token.logprobs) logprobs.push_back(*token.logprobs);
    bool const stops = text && text->push(token.id, *shown);
    bool const wanted = !on_token || on_token(token);
    if (stops || request_.stop_token_ids.count(token.id) == 1) {
      reason = FinishReason::stop;
    } else if (stats.total_tokens() + static_cast<std::int64_t>(count) == request_.max_new_tokens) {
      reason = FinishReason::length;
    } else if (!wanted) {
      reason = FinishReason::cancelled;
    }
  }
  if (!reason && lengths[0] == context_) reason = FinishReason::context;  // no step can run over the last token
  if (reason && text) text->finish(*shown);
  std::vector<std::int64_t> next_ids{block[count - 1].id};
  make_room(generation_.tokens, count);
  make_room(generation_.logprobs, count);
  make_room(stats.exit_layer, count);
  make_room(stats.layers_run, count);

  // From here on nothing throws.
  (generation_.tokens.empty() ? stats.prefill_seconds : stats.decode_seconds) += seconds;
  count_drafts(decoder.counts(), stats);
  stats.layer_tokens_run = (stats.drafted - stats.accepted) * stats.num_layers;  // of what every layer ran and is undone
  for (std::size_t k = 0; k < depths_.size(); ++k) {
    stats.layer_tokens_run += (lengths[k] - cached_tokens) * (depths_[k] - (k == 0 ? 0 : depths_[k - 1]));
  }
  stats.layer_tokens_total = stats.num_layers * (lengths[0] - cached_tokens);
  for (std::size_t i = 0; i < count; ++i) {
    generation_.tokens.push_back(block[i].id);
    stats.exit_layer.push_back(block[i].exit_layer);
    stats.layers_run.push_back(block[i].layers_run);
  }
  for (TokenLogprobs& one : logprobs) generation_.logprobs.push_back(std::move(one));
  text_ = std::move(text);
  generation_.text = std::move(shown);
  generation_.finish_reason = reason.value_or(generation_.finish_reason);
  ended_ = reason.has_value();
  next_ids_ = std::move(next_ids);
  return count;
}

void Progress::finish(FinishReason reason) {
  if (text_) text_->finish(*generation_.text);
  generation_.finish_reason = reason;
  ended_ = true;
}

std::string Progress::text_from(std::size_t from) const {
  if (!generation_.text) return {};
  std::size_t const end = text_ && !ended_ ? text_->certain(*generation_.text) : generation_.text->size();
  return from < end ? generation_.text->substr(from, end - from) : std::string();
}

Generation Progress::so_far() const {
  Generation made = generation_;
  if (text_ && !ended_) made.text->resize(text_->certain(*made.text));
  return made;
}

}  // namespace tide

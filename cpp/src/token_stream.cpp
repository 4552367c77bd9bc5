// Generates the tokens of one prompt as they are read.
#include "decoding/decoder.h"
#include "decoding/generation.h"
#include "decoding/prompt_scores.h"
#include "machine.h"
#include "request.h"
#include "room.h"
#include "sequence.h"
#include "tide/runtime.h"

namespace tide {

class TokenStream::Impl {
 public:
  Impl(std::shared_ptr<Backend> const& backend, State state, std::vector<std::int64_t> const& prompt,
       std::unique_ptr<Request> request, std::function<bool(Token const&)> on_token)
      : request_(std::move(request)),
        on_token_(std::move(on_token)),
        state_(std::move(state)),
        drafts_(request_->drafts ? backend->start_drafts(1) : nullptr),
        decoder_(make_decoder(backend->manifest(), *request_, 0, nullptr, drafts_ ? &drafts_->info() : nullptr)),
        progress_(backend->manifest(), prompt, *request_) {
    if (request_->prompt_logprobs) scores_.emplace(backend->manifest(), prompt, *request_->prompt_logprobs);
    state_.use_candidates(scores_ ? 0 : decoder_->candidates);
    state_.use_states(decoder_->reads_states());
    progress_.begin(*decoder_);
  }

  bool step() {
    if (ended()) return false;
    double const started = seconds_now();
    if (!begun_) progress_.begin(*decoder_);
    state_.settle(decoder_->settled);
    begun_ = true;
    if (scores_ && !scores_->done()) {
      score();
      seconds_ += seconds_now() - started;
      return true;
    }
    if (!block_) {
      if (!result_) {
        while (decoder_->asks_drafter(1)) decoder_->take_draft(drafts_->run({{0, decoder_->draft_rows()}})[0], 1);
        StepRequest const& request = decoder_->request();
        auto const ran = static_cast<std::size_t>(state_.length() - decoder_->length());  // of the prompt, for its scores
        result_ = state_.step(request.ids.data() + ran, request.ids.size() - ran, request.logits_to_keep, request.full);
        decoder_->read_states(*result_);
      }
      block_ = decoder_->take(*result_);
      result_.reset();
      seconds_ += seconds_now() - started;
    }
    if (state_.length() > decoder_->length()) state_.rewind(decoder_->length());
    if (!block_->empty()) take();
    block_.reset();
    return !ended();
  }

  bool ended() const { return progress_.ended(); }
  Generation so_far() const { return progress_.so_far(); }
  std::vector<Token> const& tokens() const { return tokens_; }

 private:
  // Runs a piece of the prompt whose log-probabilities are asked for.
  void score() {
    if (!result_) {
      StepRequest const& piece = scores_->request(kNoLimit);
      result_ = state_.step(piece.ids, piece.logits_to_keep, piece.full);
      decoder_->read_states(*result_);
    }
    scores_->take(*result_);
    result_.reset();
    if (scores_->done()) progress_.take(scores_->tokens());
  }

  void take() {
    make_room(tokens_, block_->size());
    std::size_t const count = progress_.take(*block_, *decoder_, state_.lengths(), seconds_, on_token_);
    for (std::size_t i = 0; i < count; ++i) tokens_.push_back(std::move((*block_)[i]));
    seconds_ = 0;
    begun_ = false;
  }

  std::unique_ptr<Request> const request_;
  std::function<bool(Token const&)> const on_token_;
  State state_;
  std::unique_ptr<Drafts> const drafts_;  // null: there is no drafter
  std::unique_ptr<Decoder> const decoder_;
  Progress progress_;
  std::optional<PromptScores> scores_;  // where the prompt's log-probabilities are asked for
  std::vector<Token> tokens_;
  // What the next call goes on with, where one threw.
  bool begun_ = true;                         // whether the decoder has begun the next block
  std::optional<StepResult> result_;          // of a step whose tokens are not chosen yet
  std::optional<std::vector<Token>> block_;  // that is chosen, and is not yet part of the generation
  double seconds_ = 0;                        // that the steps of the block took so far
};

TokenStream::TokenStream(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TokenStream::TokenStream(TokenStream&&) noexcept = default;
TokenStream& TokenStream::operator=(TokenStream&&) noexcept = default;
TokenStream::~TokenStream() = default;

bool TokenStream::step() { return impl_->step(); }

std::optional<Token> TokenStream::next() {
  while (read_ == tokens().size() && !ended()) step();
  if (read_ == tokens().size()) return std::nullopt;
  return tokens()[read_++];
}

std::vector<Token> const& TokenStream::tokens() const { return impl_->tokens(); }
bool TokenStream::ended() const { return impl_->ended(); }
Generation TokenStream::so_far() const { return impl_->so_far(); }

TokenStream Engine::open_stream(std::vector<std::int64_t> const& prompt, GenerationConfig const& config,
                                std::function<bool(Token const&)> on_token) const {
  check_prompt(manifest(), prompt, "the prompt");
  GenerationConfig const resolved = without_auto(backend_->bundle(), config, auto_mode(), false);
  auto request = std::make_unique<Request>(*backend_, resolved, std::nullopt);
  if (request->states && request->mode == Mode::exit) {
    throw GenerationError("states in mode 'exit' is for lists of prompts and schedulers: one sequence's graph gives no "
                          "states of exits");
  }
  State state = start(request->thresholds, request->max_pending, resolved.adapter);
  return TokenStream(
      std::make_unique<TokenStream::Impl>(backend_, std::move(state), prompt, std::move(request), std::move(on_token)));
}

TokenStream Engine::open_stream(std::vector<std::int64_t> const& prompt, GenerationConfig const& config) const {
  return open_stream(prompt, config, nullptr);
}

Generation Engine::generate(std::vector<std::int64_t> const& prompt, GenerationConfig const& config) const {
  return stream(prompt, config, nullptr);
}

Generation Engine::stream(std::vector<std::int64_t> const& prompt, GenerationConfig const& config,
                          std::function<bool(Token const&)> const& on_token) const {
  TokenStream stream = open_stream(prompt, config, on_token);
  while (stream.step()) {
  }
  return stream.so_far();
}

}  // namespace tide

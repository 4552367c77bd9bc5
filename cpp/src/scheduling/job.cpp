#include "scheduling/job.h"

#include <algorithm>
#include <cassert>

#include "room.h"

namespace tide {
namespace {

constexpr double kLongestWait = 1e8;  // seconds: the clock's own count overflows far later

}  // namespace

Job::Job(Manifest const& manifest, std::vector<std::int64_t> const& prompt, std::shared_ptr<Request> request,
         std::size_t number, std::optional<double> deadline, std::function<bool(Token const&)> on_token)
    : prompt_(prompt),
      request_(std::move(request)),
      reserved_(std::min(static_cast<std::int64_t>(prompt.size()) + std::min(request_->max_new_tokens, kNoLimit),
                         context_of(manifest))),
      deadline_(deadline),
      on_token_(std::move(on_token)),
      manifest_(manifest),
      number_(number),
      progress_(manifest, prompt, *request_) {}

void Job::begin(Sequence& sequence, std::shared_ptr<Audit> const& audit, DraftsInfo const* drafter,
                std::shared_ptr<SharedDrafting> const& shared) {
  decoder_ = make_decoder(manifest_, *request_, number_, audit, drafter, shared);
  progress_.begin(*decoder_);
  if (request_->prompt_logprobs) scores_.emplace(manifest_, prompt_, *request_->prompt_logprobs);
  sequence.candidates = scores_ ? 0 : decoder_->candidates();
  sequence.states = request_->states && request_->mode == Mode::full;
  sequence.exit_state = request_->states && request_->mode == Mode::exit;
  sequence.scores = decoder_->verifies();
  sequence.draft_states = decoder_->reads_hidden();
  sequence_ = &sequence;
}

void Job::skip(std::int64_t count) {
  stepped_ = static_cast<std::size_t>(count);
  std::lock_guard<std::mutex> const lock(mutex_);
  progress_.cached_tokens = count;
}

std::vector<std::int64_t> Job::text() const {
  std::vector<std::int64_t> ids = prompt_;
  for (Token const& token : tokens_) ids.push_back(token.id);  // which this thread alone changes
  return ids;
}

StepRequest const* Job::next_step(std::int64_t limit, bool full) {
  sequence_->settled = decoder_->settled();
  if (scores_prompt()) {
    if (limit < 1) return nullptr;
    StepRequest const& piece = scores_->request(limit);
    count_ = piece.ids.size();
    return &piece;
  }
  StepRequest const& request = decoder_->request();
  auto const rest = static_cast<std::int64_t>(request.ids.size() - stepped_);
  std::int64_t count = rest;
  if (reads_prompt_ && rest > limit) {
    if (limit < 1) return nullptr;
    count = limit;
  }
  count_ = static_cast<std::size_t>(count);
  if (count_ == request.ids.size()) return &request;
  auto const first = request.ids.begin() + static_cast<std::ptrdiff_t>(stepped_);
  part_.ids.assign(first, first + count);
  part_.logits_to_keep = request.logits_to_keep;
  part_.full = request.full || (full && count < rest);
  return &part_;
}

bool Job::take(StepResult const& result, double seconds) {
  if (!read_) {
    decoder_->read_hidden(result, sequence_->exit_state);
    seconds_ += seconds;
    read_ = true;
  }
  if (scores_prompt()) {
    scores_->take(result);
    end_step();
    if (!scores_->done()) return false;
    std::lock_guard<std::mutex> const lock(mutex_);
    progress_.take(scores_->take_tokens());
    return false;
  }
  if (stepped_ + count_ < decoder_->request().ids.size()) {
    end_step();
    return false;
  }
  if (!block_) block_ = decoder_->take(result);
  if (sequence_->length() > decoder_->length()) sequence_->rewind(decoder_->length());
  if (!block_->empty() && begun_) take_block();
  bool const ended = progress_.ended();
  if (!begun_ && !ended) progress_.begin(*decoder_);
  begun_ = true;
  block_.reset();
  end_step();
  stepped_ = 0;
  return ended;
}

void Job::end_step() {
  stepped_ += count_;
  read_ = false;
}

// Makes the block part of the generation.
void Job::take_block() {
  {
    std::lock_guard<std::mutex> const lock(mutex_);
    make_room(tokens_, block_->size());
    std::size_t const count = progress_.take(*block_, *decoder_, sequence_->lengths, seconds_, on_token_);
    for (std::size_t i = 0; i < count; ++i) tokens_.push_back(std::move((*block_)[i]));
  }
  changed_.notify_all();
  seconds_ = 0;
  reads_prompt_ = begun_ = false;
}

void Job::end(std::optional<FinishReason> reason, std::exception_ptr error) noexcept {
  decoder_.reset();
  scores_.reset();
  sequence_ = nullptr;
  part_ = {};
  block_.reset();
  {
    std::lock_guard<std::mutex> const lock(mutex_);
    assert(!ended_);
    try {
      if (reason) progress_.finish(*reason);
    } catch (...) {  // of the detokenizer
      error = std::current_exception();
    }
    error_ = std::move(error);
    ended_ = true;
  }
  changed_.notify_all();
}

bool Job::ready(std::size_t read) const {
  std::lock_guard<std::mutex> const lock(mutex_);
  return is_ready(read);
}

void Job::wait(std::size_t read, std::optional<double> seconds) const {
  std::unique_lock<std::mutex> lock(mutex_);
  auto const ready = [&] { return is_ready(read); };
  if (!seconds) return changed_.wait(lock, ready);
  double const most = *seconds > 0 ? std::min(*seconds, kLongestWait) : 0;
  changed_.wait_for(lock, std::chrono::duration<double>(most), ready);
}

std::size_t Job::read(std::size_t from, std::int64_t* ids, std::size_t room) const {
  std::lock_guard<std::mutex> const lock(mutex_);
  std::size_t const count = std::min(room, tokens_.size() - std::min(from, tokens_.size()));
  for (std::size_t i = 0; i < count; ++i) ids[i] = tokens_[from + i].id;
  return count;
}

bool Job::finished(std::size_t read) const {
  std::lock_guard<std::mutex> const lock(mutex_);
  return ended_ && tokens_.size() <= read;
}

std::optional<Token> Job::token(std::size_t number) const {
  std::lock_guard<std::mutex> const lock(mutex_);
  if (number < tokens_.size()) return tokens_[number];
  if (error_) std::rethrow_exception(error_);
  return std::nullopt;
}

std::string Job::shown(std::size_t from) const {
  std::lock_guard<std::mutex> const lock(mutex_);
  return progress_.text_from(from);
}

Generation Job::generation() const {
  std::lock_guard<std::mutex> const lock(mutex_);
  return progress_.so_far();
}

Generation Job::finished() {
  std::lock_guard<std::mutex> const lock(mutex_);
  return progress_.finished();
}

std::optional<FinishReason> Job::finish_reason() const {
  std::lock_guard<std::mutex> const lock(mutex_);
  if (!ended_ || error_) return std::nullopt;
  return progress_.finish_reason();
}

std::exception_ptr Job::error() const {
  std::lock_guard<std::mutex> const lock(mutex_);
  return error_;
}

std::int64_t Job::cached_tokens() const {
  std::lock_guard<std::mutex> const lock(mutex_);
  return progress_.cached_tokens;
}

}  // namespace tide

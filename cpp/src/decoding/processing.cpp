#include "decoding/processing.h"

#include "generation_error.h"
#include "request.h"
#include "room.h"

namespace tide {

LogitsProcessing::LogitsProcessing(GenerationConfig const& config)
    : processor_(config.logits_processor),
      allows_token_(config.allows_token),
      repetition_(static_cast<float>(config.repetition_penalty)),
      presence_(static_cast<float>(config.presence_penalty)),
      frequency_(static_cast<float>(config.frequency_penalty)),
      counts_tokens_(repetition_ != 1 || presence_ != 0 || frequency_ != 0) {
  for (auto const& [id, bias] : config.logit_bias) {
    bias_.emplace_back(static_cast<std::size_t>(whole_number("a token id of logit_bias", id, 0)),
                       static_cast<float>(real_number("a bias of logit_bias", bias)));
  }
}

bool LogitsProcessing::needed(GenerationConfig const& config) {
  return config.logits_processor || config.allows_token || config.repetition_penalty != 1 || config.presence_penalty != 0 ||
         config.frequency_penalty != 0 || !config.logit_bias.empty();
}

void LogitsProcessing::begin(std::vector<std::int64_t> const& prompt) {
  ids_ = prompt;
  counts_.clear();
  if (repetition_ == 1) return;  // the other penalties count what is generated
  for (std::int64_t const id : prompt) ++counts_[id].all;
}

void LogitsProcessing::accept(std::int64_t token) {
  make_room(ids_, 1);
  if (counts_tokens_) {
    Count& count = counts_[token];
    ++count.all;
    ++count.generated;
  }
  ids_.push_back(token);
}

bool LogitsProcessing::allows(std::int64_t token) const {
  return !allows_token_ || or_generation_error("allows_token failed", [&] { return allows_token_(ids_, token); });
}

void LogitsProcessing::rewind(std::size_t length) {
  for (; ids_.size() > length; ids_.pop_back()) {
    if (!counts_tokens_) continue;
    auto const at = counts_.find(ids_.back());
    --at->second.generated;
    if (--at->second.all == 0) counts_.erase(at);
  }
}

float const* LogitsProcessing::operator()(float const* logits, std::size_t vocabulary) {
  logits_.assign(logits, logits + vocabulary);
  if (processor_) {
    or_generation_error("logits_processor failed", [&] { processor_(ids_, logits_.data(), vocabulary); });
  }
  for (auto const& [id, count] : counts_) {
    float& logit = logits_[static_cast<std::size_t>(id)];
    if (repetition_ != 1) logit = logit > 0 ? logit / repetition_ : logit * repetition_;
    if (count.generated == 0) continue;
    // The product is exact in a double: compilers must not fuse it with the subtraction, which NumPy does not.
    logit -= static_cast<float>(static_cast<double>(frequency_) * static_cast<double>(count.generated));
    logit -= presence_;
  }
  for (auto const& [id, bias] : bias_) logits_[id] += bias;
  return logits_.data();
}

}  // namespace tide

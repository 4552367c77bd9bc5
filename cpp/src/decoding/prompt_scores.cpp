#include "decoding/prompt_scores.h"

#include <algorithm>

#include "decoding/sampling.h"
#include "room.h"

namespace tide {
namespace {

constexpr std::int64_t kMostLogits = std::int64_t{1} << 24;  // of one step: 64 MiB

}  // namespace

PromptScores::PromptScores(Manifest const& manifest, std::vector<std::int64_t> const& prompt, std::size_t most)
    : prompt_(prompt), most_(most), rows_(rows(manifest)) {}

std::int64_t PromptScores::rows(Manifest const& manifest) {
  return std::max<std::int64_t>(kMostLogits / manifest.model.vocab_size, 1);
}

StepRequest const& PromptScores::request(std::int64_t limit) {
  auto const left = static_cast<std::int64_t>(prompt_.size()) - 1 - run_;
  std::int64_t const count = std::min({left, limit, rows_});
  auto const first = prompt_.begin() + static_cast<std::ptrdiff_t>(run_);
  request_.ids.assign(first, first + static_cast<std::ptrdiff_t>(count));
  request_.logits_to_keep = count;
  request_.full = true;
  return request_;
}

void PromptScores::take(StepResult const& result) {
  std::size_t const count = request_.ids.size(), next = static_cast<std::size_t>(run_) + 1;
  std::vector<PromptToken> made;
  for (std::size_t i = 0; i < count; ++i) {
    std::int64_t const id = prompt_[next + i];
    made.push_back({id, logprobs_of(result.row(i), result.vocabulary, id, most_)});
  }
  make_room(tokens_, count);
  for (PromptToken& one : made) tokens_.push_back(std::move(one));
  run_ += static_cast<std::int64_t>(count);
}

}  // namespace tide

#include "decoding/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "request.h"
#include "formatting.h"

namespace tide {
namespace {

constexpr std::size_t kFirstSorted = 64;  // most likely tokens to sort first: mostly enough to reach top_p

// The index of the first of the largest logits. Throws GenerationError: it is not finite, or any logit is NaN.
std::size_t checked_best(float const* logits, std::size_t vocabulary) {
  std::size_t best = 0;
  bool ordered = true;
  for (std::size_t i = 0; i < vocabulary; ++i) {
    ordered = ordered && !std::isnan(logits[i]);
    if (logits[i] > logits[best]) best = i;
  }
  if (!ordered || !std::isfinite(logits[best])) throw GenerationError("the model's logits are not finite");
  return best;
}

// The ids of the k largest logits, ascending; of equal ones at the edge, the lowest ids.
std::vector<std::int64_t> top_ids(float const* logits, std::size_t vocabulary, std::size_t k) {
  std::vector<std::int64_t> ids(vocabulary);
  std::iota(ids.begin(), ids.end(), 0);
  auto const edge = ids.begin() + static_cast<std::ptrdiff_t>(k);
  std::nth_element(ids.begin(), edge, ids.end(), [&](std::int64_t a, std::int64_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  });
  ids.erase(edge, ids.end());
  std::sort(ids.begin(), ids.end());
  return ids;
}

// The fewest most likely choices that sum to `share` or more, most likely first.
Choices nucleus(Choices const& all, double share) {
  std::vector<std::size_t> order(all.ids.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  Choices top;
  double sum = 0;
  std::size_t sorted = 0;
  for (std::size_t i = 0; i < order.size() && sum < share; ++i) {
    if (i == sorted) {  // sorts as far as needed: a vocabulary is long and the nucleus mostly short
      sorted = std::min(order.size(), std::max(4 * sorted, kFirstSorted));
      auto const at = [&](std::size_t index) { return order.begin() + static_cast<std::ptrdiff_t>(index); };
      std::partial_sort(at(i), at(sorted), order.end(), [&](std::size_t a, std::size_t b) {
        return all.weights[a] > all.weights[b] || (all.weights[a] == all.weights[b] && a < b);
      });
    }
    top.ids.push_back(all.ids[order[i]]);
    top.weights.push_back(all.weights[order[i]]);
    sum += top.weights.back();
  }
  for (double& weight : top.weights) weight /= sum;
  return top;
}

// The choices of at least `share` of the largest probability, which sum to 1 again.
Choices likely(Choices const& all, double share) {
  double const least = share * *std::max_element(all.weights.begin(), all.weights.end());
  Choices kept;
  double sum = 0;
  for (std::size_t i = 0; i < all.ids.size(); ++i) {
    if (all.weights[i] < least) continue;
    kept.ids.push_back(all.ids[i]);
    kept.weights.push_back(all.weights[i]);
    sum += all.weights[i];
  }
  for (double& weight : kept.weights) weight /= sum;
  return kept;
}

// The log-probabilities of a token and of the k most likely.
TokenLogprobs logprobs_of(float const* logits, std::size_t vocabulary, std::int64_t token, std::size_t k) {
  double const best = *std::max_element(logits, logits + vocabulary);
  double sum = 0;
  for (std::size_t i = 0; i < vocabulary; ++i) sum += std::exp(double{logits[i]} - best);
  double const total = best + std::log(sum);
  std::vector<std::int64_t> top = top_ids(logits, vocabulary, std::min(k, vocabulary));
  std::stable_sort(top.begin(), top.end(), [&](std::int64_t a, std::int64_t b) { return logits[a] > logits[b]; });
  TokenLogprobs logprobs{double{logits[token]} - total, {}};
  for (std::int64_t const id : top) logprobs.top.emplace_back(id, double{logits[id]} - total);
  return logprobs;
}

}  // namespace

Sampler::Sampler(GenerationConfig const& config, std::optional<std::int64_t> seed)
    : temperature_(real_number("temperature", config.temperature)),
      top_k_(static_cast<std::size_t>(config.top_k)),
      top_p_(config.top_p),
      min_p_(number_within("min_p", config.min_p, 0, 1)) {
  if (temperature_ < 0) throw GenerationError("temperature must be 0 or more, not " + shown(temperature_));
  whole_number("top_k", config.top_k, 0);
  real_number("top_p", top_p_);
  if (!(0 < top_p_ && top_p_ <= 1)) {
    throw GenerationError("top_p must be above 0 and at most 1, not " + shown(top_p_));
  }
  if (config.logprobs) logprobs_ = static_cast<std::size_t>(whole_number("logprobs", *config.logprobs, 0));
  if (LogitsProcessing::needed(config)) processing_ = std::make_unique<LogitsProcessing>(config);
  if (seed) {
    random_.seed(static_cast<std::uint64_t>(whole_number("seed", *seed, 0)));
  } else if (!greedy()) {
    std::random_device device;
    random_.seed(std::uint64_t{device()} << 32 | device());
  }
}

void Sampler::begin(std::vector<std::int64_t> const& prompt) {
  length_ = prompt.size();
  if (processing_) processing_->begin(prompt);
}

std::size_t Sampler::candidates() const {
  if (processing_ || logprobs_) return 0;
  return greedy() ? 1 : top_k_;
}

std::int64_t Sampler::choose(float const* logits, std::size_t vocabulary) {
  return greedy() ? static_cast<std::int64_t>(checked_best(logits, vocabulary))
                  : draw(distribution(logits, vocabulary));
}

Choice Sampler::operator()(StepResult const& result, std::size_t row) {
  if (result.candidates != nullptr) {
    Candidates const& some = result.candidates[row];
    auto const index = static_cast<std::size_t>(choose(some.logits.data(), some.logits.size()));
    ++length_;
    return {some.tokens[index], std::nullopt};
  }
  float const* const logits = result.row(row);
  std::size_t const vocabulary = result.vocabulary;
  if (processing_) processing_->rewind(length_);
  Choice choice{choose(processed(logits, vocabulary), vocabulary), std::nullopt};
  if (processing_) processing_->accept(choice.id);
  ++length_;
  if (logprobs_) choice.logprobs = logprobs_of(logits, vocabulary, choice.id, *logprobs_);
  return choice;
}

std::int64_t Sampler::draft(StepResult const& result) {
  if (result.candidates != nullptr) {
    Candidates const& some = result.candidates[result.rows - 1];
    return some.tokens[checked_best(some.logits.data(), some.logits.size())];
  }
  auto const id =
      static_cast<std::int64_t>(checked_best(processed(result.last(), result.vocabulary), result.vocabulary));
  if (processing_) processing_->accept(id);
  return id;
}

Choices Sampler::distribution(float const* logits, std::size_t vocabulary) const {
  double const best = logits[checked_best(logits, vocabulary)];
  Choices choices;
  if (0 < top_k_ && top_k_ < vocabulary) {
    choices.ids = top_ids(logits, vocabulary, top_k_);
  } else {
    choices.ids.resize(vocabulary);
    std::iota(choices.ids.begin(), choices.ids.end(), 0);
  }
  double sum = 0;
  for (std::int64_t const id : choices.ids) {
    choices.weights.push_back(std::exp((double{logits[id]} - best) / temperature_));  // 0 at a tiny temperature
    sum += choices.weights.back();
  }
  for (double& weight : choices.weights) weight /= sum;
  if (min_p_ > 0) choices = likely(choices, min_p_);
  return top_p_ < 1 ? nucleus(choices, top_p_) : choices;
}

std::int64_t Sampler::draw(Choices const& choices) {
  std::vector<double> edges(choices.weights.size());
  std::partial_sum(choices.weights.begin(), choices.weights.end(), edges.begin());
  auto const index = std::upper_bound(edges.begin(), edges.end(), uniform() * edges.back()) - edges.begin();
  return choices.ids[std::min(static_cast<std::size_t>(index), choices.ids.size() - 1)];
}

double Sampler::uniform() { return static_cast<double>(random_() >> 11) * 0x1p-53; }

float const* Sampler::processed(float const* logits, std::size_t vocabulary) {
  if (!processing_) return logits;
  checked_best(logits, vocabulary);
  float const* const changed = (*processing_)(logits, vocabulary);
  bool const left = std::all_of(changed, changed + vocabulary, [](float value) { return !std::isnan(value); }) &&
                    std::isfinite(*std::max_element(changed, changed + vocabulary));
  if (!left) throw GenerationError("logits_processor, logit_bias and grammar leave no token with a finite logit");
  return changed;
}

}  // namespace tide

#include "decoding/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "decoding/random.h"
#include "formatting.h"
#include "request.h"

namespace tide {
namespace {

constexpr std::size_t kHeap = 1024;  // of top-k: up to so many a heap holds the largest logits so far
constexpr double kTiny = 1e-30, kHuge = 1e30;  // temperatures beyond which nothing changes any more

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

// The indices of the k largest logits, ascending; of equal ones at the edge, the lowest.
std::vector<std::size_t> top_indices(float const* logits, std::size_t count, std::size_t k) {
  auto const larger = [&](std::size_t a, std::size_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  };
  std::vector<std::size_t> top(k <= kHeap ? k : count);
  std::iota(top.begin(), top.end(), std::size_t{0});
  if (k <= kHeap) {
    std::make_heap(top.begin(), top.end(), larger);  // the smallest is in front
    for (std::size_t i = k; k > 0 && i < count; ++i) {
      if (!(logits[i] > logits[top.front()])) continue;
      std::pop_heap(top.begin(), top.end(), larger);
      top.back() = i;
      std::push_heap(top.begin(), top.end(), larger);
    }
  } else {
    auto const edge = top.begin() + static_cast<std::ptrdiff_t>(k);
    std::nth_element(top.begin(), edge, top.end(), larger);
    top.erase(edge, top.end());
  }
  std::sort(top.begin(), top.end());
  return top;
}

// Keeps the fewest indices of the largest weights that sum to a share or more; ascending.
void keep_nucleus(std::vector<std::size_t>& indices, std::vector<float> const& weights, double share) {
  double const total = std::accumulate(weights.begin(), weights.end(), 0.0);
  // All that are less than this add up to half of what may be omitted, at most.
  double const least = (1 - share) * total / (2 * static_cast<double>(weights.size()));
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] >= least) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return weights[a] > weights[b]; });
  double sum = 0;
  std::vector<std::size_t> kept;
  for (std::size_t i = 0; i < order.size() && (kept.empty() || sum < share * total); ++i) {
    kept.push_back(indices[order[i]]);
    sum += weights[order[i]];
  }
  std::sort(kept.begin(), kept.end());
  indices = std::move(kept);
}

// The best token so far of a draw.
struct Drawn {
  std::size_t index;
  double score;

  void consider(std::size_t candidate, double scaled, std::uint32_t word) {
    if (scaled + GumbelNoise::bound(word) < score) return;
    double const other = scaled + GumbelNoise::of(word);
    if (other > score || (other == score && candidate < index)) *this = {candidate, other};
  }
};

// The log-probabilities of a token and of the k most likely.
TokenLogprobs logprobs_of(float const* logits, std::size_t vocabulary, std::int64_t token, std::size_t k) {
  double const best = *std::max_element(logits, logits + vocabulary);
  double sum = 0;
  for (std::size_t i = 0; i < vocabulary; ++i) sum += std::exp(double{logits[i]} - best);
  double const total = best + std::log(sum);
  std::vector<std::size_t> top = top_indices(logits, vocabulary, std::min(k, vocabulary));
  std::stable_sort(top.begin(), top.end(), [&](std::size_t a, std::size_t b) { return logits[a] > logits[b]; });
  TokenLogprobs logprobs{double{logits[token]} - total, {}};
  for (std::size_t const id : top) {
    logprobs.top.emplace_back(static_cast<std::int64_t>(id), double{logits[id]} - total);
  }
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
    seed_ = static_cast<std::uint64_t>(whole_number("seed", *seed, 0));
  } else if (!greedy()) {
    std::random_device device;
    seed_ = std::uint64_t{device()} << 32 | device();
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

std::size_t Sampler::choose(float const* logits, std::size_t count, std::int64_t const* tokens) const {
  std::size_t const best = checked_best(logits, count);
  return greedy() ? best : draw(logits, count, tokens, best);
}

// Noise is needed of the tokens alone that can win: most logits are too low for any, and most words for their logit.
std::size_t Sampler::draw(float const* logits, std::size_t count, std::int64_t const* tokens, std::size_t best) const {
  double const temperature = std::clamp(temperature_, kTiny, kHuge), most = logits[best];
  auto const scaled = [&](std::size_t i) { return (double{logits[i]} - most) / temperature; };
  GumbelNoise const noise(seed_, length_);
  auto const token = [&](std::size_t i) { return tokens == nullptr ? static_cast<std::int64_t>(i) : tokens[i]; };
  Drawn drawn{best, GumbelNoise::of(noise.word(token(best)))};
  bool const keeps_all = (top_k_ == 0 || top_k_ >= count) && min_p_ <= 0 && top_p_ >= 1;
  if (keeps_all && tokens == nullptr) {
    for (std::size_t first = 0; first < count; first += 4) {
      std::size_t const end = std::min(first + 4, count);
      double const largest = *std::max_element(logits + first, logits + end);
      if ((largest - most) / temperature + GumbelNoise::kMost < drawn.score) continue;
      PhiloxBlock const words = noise.block(static_cast<std::uint32_t>(first / 4));
      for (std::size_t i = first; i < end; ++i) drawn.consider(i, scaled(i), words[i - first]);
    }
    return drawn.index;
  }
  std::vector<std::size_t> kept;
  if (0 < top_k_ && top_k_ < count) {
    kept = top_indices(logits, count, top_k_);
  } else {
    kept.resize(count);
    std::iota(kept.begin(), kept.end(), std::size_t{0});
  }
  if (min_p_ > 0) {
    double const least = std::log(min_p_);
    kept.erase(std::remove_if(kept.begin(), kept.end(), [&](std::size_t i) { return scaled(i) < least; }), kept.end());
  }
  if (top_p_ < 1) {
    std::vector<float> weights;
    weights.reserve(kept.size());
    for (std::size_t const i : kept) weights.push_back(std::exp(static_cast<float>(scaled(i))));
    keep_nucleus(kept, weights, top_p_);
  }
  for (std::size_t const i : kept) {
    if (scaled(i) + GumbelNoise::kMost >= drawn.score) drawn.consider(i, scaled(i), noise.word(token(i)));
  }
  return drawn.index;
}

Choice Sampler::operator()(StepResult const& result, std::size_t row) {
  if (result.candidates != nullptr) {
    Candidates const& some = result.candidates[row];
    std::size_t const index = choose(some.logits.data(), some.logits.size(), some.tokens.data());
    ++length_;
    return {some.tokens[index], std::nullopt};
  }
  float const* const logits = result.row(row);
  std::size_t const vocabulary = result.vocabulary;
  if (processing_) processing_->rewind(length_);
  std::size_t const index = choose(processed(logits, vocabulary), vocabulary, nullptr);
  Choice choice{static_cast<std::int64_t>(index), std::nullopt};
  if (logprobs_) choice.logprobs = logprobs_of(logits, vocabulary, choice.id, *logprobs_);
  if (processing_) processing_->accept(choice.id);
  ++length_;
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

bool Sampler::take_draft(std::int64_t token) {
  if (!processing_) return true;
  if (!processing_->allows(token)) return false;
  processing_->accept(token);
  return true;
}

float const* Sampler::processed(float const* logits, std::size_t vocabulary) {
  if (!processing_) return logits;
  checked_best(logits, vocabulary);
  float const* const changed = (*processing_)(logits, vocabulary);
  bool const left = std::all_of(changed, changed + vocabulary, [](float value) { return !std::isnan(value); }) &&
                    std::isfinite(*std::max_element(changed, changed + vocabulary));
  if (!left) throw ConstraintError("logits_processor, logit_bias and grammar leave no token with a finite logit");
  return changed;
}

}  // namespace tide

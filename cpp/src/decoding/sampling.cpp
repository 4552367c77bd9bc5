#include "decoding/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "request.h"
#include "formatting.h"

namespace tide {
namespace {

constexpr std::size_t kFirstSorted = 64;  // of the most likely tokens: mostly enough to reach top_p

// The first of the largest logits. NaN counts as the largest, so that it is found.
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

// Ids of exactly k largest logits, ascending; of equals at the edge the lowest ids stay.
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

// The fewest most likely choices that add up to `share` or more, likeliest first.
Choices nucleus(Choices const& all, double share) {
  std::vector<std::size_t> order(all.ids.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  Choices kept;
  double sum = 0;
  std::size_t sorted = 0;
  for (std::size_t i = 0; i < order.size() && sum < share; ++i) {
    if (i == sorted) {  // a vocabulary is long and the nucleus mostly short: it is sorted as far as needed
      sorted = std::min(order.size(), std::max(4 * sorted, kFirstSorted));
      auto const at = [&](std::size_t place) { return order.begin() + static_cast<std::ptrdiff_t>(place); };
      std::partial_sort(at(i), at(sorted), order.end(), [&](std::size_t a, std::size_t b) {
        return all.weights[a] > all.weights[b] || (all.weights[a] == all.weights[b] && a < b);
      });
    }
    kept.ids.push_back(all.ids[order[i]]);
    kept.weights.push_back(all.weights[order[i]]);
    sum += kept.weights.back();
  }
  for (double& weight : kept.weights) weight /= sum;
  return kept;
}

}  // namespace

Sampler::Sampler(Request const& request, std::optional<std::int64_t> seed)
    : temperature_(real_number("temperature", request.temperature)),
      top_k_(static_cast<std::size_t>(request.top_k)),
      top_p_(request.top_p) {
  if (temperature_ < 0) throw GenerationError("temperature must be 0 or more, not " + shown(temperature_));
  whole_number("top_k", request.top_k, 0);
  real_number("top_p", top_p_);
  if (!(0 < top_p_ && top_p_ <= 1)) {
    throw GenerationError("top_p must be above 0 and at most 1, not " + shown(top_p_));
  }
  if (seed) {
    random_.seed(static_cast<std::uint64_t>(whole_number("seed", *seed, 0)));
  } else if (!greedy()) {
    std::random_device device;
    random_.seed(std::uint64_t{device()} << 32 | device());
  }
}

std::int64_t Sampler::operator()(float const* logits, std::size_t vocabulary) {
  if (greedy()) return static_cast<std::int64_t>(checked_best(logits, vocabulary));
  return draw(distribution(logits, vocabulary));
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
  return top_p_ < 1 ? nucleus(choices, top_p_) : choices;
}

std::int64_t Sampler::draw(Choices const& choices) {
  std::vector<double> edges(choices.weights.size());
  std::partial_sum(choices.weights.begin(), choices.weights.end(), edges.begin());
  auto const place = std::upper_bound(edges.begin(), edges.end(), uniform() * edges.back()) - edges.begin();
  return choices.ids[std::min(static_cast<std::size_t>(place), choices.ids.size() - 1)];
}

double Sampler::uniform() { return static_cast<double>(random_() >> 11) * 0x1p-53; }

}  // namespace tide

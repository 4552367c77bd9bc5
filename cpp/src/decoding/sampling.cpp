#include "decoding/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "decoding/random.h"
#include "formatting.h"
#include "machine.h"
#include "request.h"

namespace tide {

// A row of logits, whose blocks are passed over where their largest logit is too low.
class LogitsRow {
 public:
  // Throws GenerationError: there is none, the largest is not finite, or one is NaN.
  LogitsRow(float const* logits, std::size_t count)
      : logits_(logits), count_(count), maxima_((count + kBlock - 1) / kBlock) {
    if (count == 0) throw GenerationError("there are no logits to choose a token from");
    bool const numbers = kernel().maxima(logits, static_cast<std::int64_t>(count), maxima_.data());
    auto const most = std::max_element(maxima_.begin(), maxima_.end());  // the first
    if (!numbers || !std::isfinite(*most)) throw GenerationError("the model's logits are not finite");
    best_ = static_cast<std::size_t>(most - maxima_.begin()) * kBlock;
    while (logits[best_] != *most) ++best_;
  }

  // The first of the largest logits.
  std::size_t best() const { return best_; }
  double most() const { return logits_[best_]; }

  // The sum of the weights e^((logit - most) / T).
  double sum(double temperature) const {
    return kernel().sum(logits_, static_cast<std::int64_t>(count_), logits_[best_], static_cast<float>(temperature));
  }

  // Calls work(begin, end, largest) for each block.
  template <typename Work>
  void each_block(Work const& work) const {
    for (std::size_t block = 0; block < maxima_.size(); ++block) {
      work(block * kBlock, std::min((block + 1) * kBlock, count_), double{maxima_[block]});
    }
  }

 private:
  static constexpr std::size_t kBlock = tide_ops::kLogitsBlock;

  static tide_ops::LogitsKernel const& kernel() {
    static tide_ops::LogitsKernel const& best = *tide_ops::logits_kernel();
    return best;
  }

  float const* const logits_;
  std::size_t const count_;
  std::vector<float> maxima_;
  std::size_t best_;
};

namespace {

constexpr double kCutStep = 4;                 // by which a nucleus's least logit is lowered until it is found
constexpr std::size_t kHeap = 1024;  // of top-k: up to so many a heap holds the largest logits so far
constexpr double kUnlikely = 9;    // e^-9 is 1 in 8,000
constexpr double kTiny = 1e-30, kHuge = 1e30;  // temperatures beyond which nothing changes any more

// The first of the largest logits. Throws as `LogitsRow`.
std::size_t checked_best(float const* logits, std::size_t count) { return LogitsRow(logits, count).best(); }

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

// Keeps the fewest indices of the largest weights that sum to a share of `total` or more; ascending.
void keep_nucleus(std::vector<std::size_t>& indices, std::vector<float> const& weights, double share, double total) {
  std::vector<std::size_t> order(weights.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
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

}  // namespace

TokenLogprobs logprobs_of(float const* logits, std::size_t vocabulary, std::int64_t token, std::size_t k) {
  double const best = LogitsRow(logits, vocabulary).most();
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

Sampler::Sampler(GenerationConfig const& config, std::optional<std::int64_t> seed) : config_(within_limits(config)) {
  if (LogitsProcessing::needed(config)) processing_ = std::make_unique<LogitsProcessing>(config);
  if (seed) {
    seed_ = static_cast<std::uint64_t>(*seed);
  } else if (!greedy()) {
    seed_ = random_seed();
  }
}

void Sampler::begin(std::vector<std::int64_t> const& prompt) {
  length_ = prompt.size();
  if (processing_) processing_->begin(prompt);
}

std::size_t Sampler::candidates() const {
  if (processing_ || config_.logprobs) return 0;
  return greedy() ? 1 : static_cast<std::size_t>(config_.top_k);
}

std::size_t Sampler::choose(LogitsRow const& row, float const* logits, std::size_t count, std::int64_t const* tokens,
                            std::size_t position) const {
  return greedy() ? row.best() : draw(row, logits, count, tokens, position);
}

// After temperature, top-k, min-p and top-p: min-p keeps the tokens whose probability is at least that share of the largest, and
// top-p sums the probabilities that top-k and min-p keep, as in vLLM V1. Noise is needed of the tokens alone that can win: most
// logits are too low for any, and most words for their logit.
std::size_t Sampler::draw(LogitsRow const& row, float const* logits, std::size_t count,
                          std::int64_t const* tokens, std::size_t position) const {
  double const temperature = std::clamp(config_.temperature, kTiny, kHuge), most = row.most();
  double const min_p = config_.min_p, top_p = config_.top_p;
  auto const top_k = static_cast<std::size_t>(config_.top_k);
  auto const scaled = [&](double logit) { return (logit - most) / temperature; };
  GumbelNoise const noise(seed_, position);
  auto const token = [&](std::size_t i) { return tokens == nullptr ? static_cast<std::int64_t>(i) : tokens[i]; };
  Drawn drawn{row.best(), GumbelNoise::of(noise.word(token(row.best())))};
  bool const some_k = 0 < top_k && top_k < count;
  if (!some_k && min_p <= 0 && top_p >= 1 && tokens == nullptr) {
    row.each_block([&](std::size_t begin, std::size_t end, double largest) {
      double const missing = drawn.score - scaled(largest);
      if (missing > GumbelNoise::kMost) return;
      std::uint64_t likely = noise.likely(static_cast<std::uint32_t>(begin / 4), missing);
      if (end - begin < std::size_t{tide_ops::kLogitsBlock}) likely &= (std::uint64_t{1} << (end - begin)) - 1;
      for (; likely != 0; likely &= likely - 1) {
        std::size_t const i = begin + static_cast<std::size_t>(__builtin_ctzll(likely));
        drawn.consider(i, scaled(logits[i]), noise.word(static_cast<std::int64_t>(i)));
      }
    });
    return drawn.index;
  }
  // The indices whose scaled logits are at least `cut`.
  auto const from = [&](double cut) {
    std::vector<std::size_t> found;
    row.each_block([&](std::size_t begin, std::size_t end, double largest) {
      if (scaled(largest) < cut) return;
      for (std::size_t i = begin; i < end; ++i) {
        if (!(scaled(logits[i]) < cut)) found.push_back(i);
      }
    });
    return found;
  };
  auto const weights_of = [&](std::vector<std::size_t> const& indices) {
    std::vector<float> weights;
    weights.reserve(indices.size());
    for (std::size_t const i : indices) weights.push_back(std::exp(static_cast<float>(scaled(logits[i]))));
    return weights;
  };
  constexpr double kAll = -std::numeric_limits<double>::infinity();
  std::vector<std::size_t> kept;
  if (some_k || min_p > 0 || top_p >= 1) {
    kept = some_k ? top_indices(logits, count, top_k) : from(min_p > 0 ? std::log(min_p) : kAll);
    if (some_k && min_p > 0) {
      auto const unlikely = [&](std::size_t i) { return scaled(logits[i]) < std::log(min_p); };
      kept.erase(std::remove_if(kept.begin(), kept.end(), unlikely), kept.end());
    }
    if (top_p < 1) {
      std::vector<float> const weights = weights_of(kept);
      keep_nucleus(kept, weights, top_p, std::accumulate(weights.begin(), weights.end(), 0.0));
    }
  } else {  // the nucleus of all: the largest few, mostly
    double const total = row.sum(temperature);
    for (double cut = -kCutStep;; cut -= kCutStep) {
      bool const all = cut < -88;  // the weights of the rest are 0
      kept = from(all ? kAll : cut);
      std::vector<float> const weights = weights_of(kept);
      if (!all && std::accumulate(weights.begin(), weights.end(), 0.0) < top_p * total) continue;
      keep_nucleus(kept, weights, top_p, total);
      break;
    }
  }
  for (std::size_t const i : kept) {
    if (scaled(logits[i]) + GumbelNoise::kMost >= drawn.score) {
      drawn.consider(i, scaled(logits[i]), noise.word(token(i)));
    }
  }
  return drawn.index;
}

// As `draw` among the tokens that have at least e^-kUnlikely times the largest probability.
std::size_t Sampler::draw_likely(LogitsRow const& row, float const* logits, std::int64_t const* tokens,
                                 std::size_t position) const {
  double const temperature = std::clamp(config_.temperature, kTiny, kHuge), most = row.most();
  GumbelNoise const noise(seed_, position);
  Drawn drawn{row.best(), -std::numeric_limits<double>::infinity()};
  float const least = static_cast<float>(most - kUnlikely * temperature);
  row.each_block([&](std::size_t begin, std::size_t end, double largest) {
    if (largest < least) return;
    for (std::size_t i = begin; i < end; ++i) {
      if (logits[i] < least) continue;
      std::int64_t const token = tokens == nullptr ? static_cast<std::int64_t>(i) : tokens[i];
      drawn.consider(i, (logits[i] - most) / temperature, noise.word(token));
    }
  });
  return drawn.index;
}

Choice Sampler::operator()(StepResult const& result, std::size_t row) {
  if (result.candidates != nullptr) {
    Candidates const& some = result.candidates[row];
    LogitsRow const candidates(some.logits.data(), some.logits.size());
    std::size_t const index =
        choose(candidates, some.logits.data(), some.logits.size(), some.tokens.data(), length_);
    ++length_;
    return {some.tokens[index], std::nullopt};
  }
  float const* const logits = result.row(row);
  std::size_t const vocabulary = result.vocabulary;
  if (processing_) processing_->rewind(length_);
  float const* const choices = processed(logits, vocabulary);
  std::size_t const index = choose(LogitsRow(choices, vocabulary), choices, vocabulary, nullptr, length_);
  Choice choice{static_cast<std::int64_t>(index), std::nullopt};
  if (config_.logprobs) choice.logprobs = logprobs_of(logits, vocabulary, choice.id, *config_.logprobs);
  if (processing_) processing_->accept(choice.id);
  ++length_;
  return choice;
}

std::int64_t Sampler::draft(StepResult const& result, std::size_t ahead) {
  std::size_t const position = length_ + ahead;
  if (result.candidates != nullptr) {
    Candidates const& some = result.candidates[result.rows - 1];
    LogitsRow const row(some.logits.data(), some.logits.size());
    return some.tokens[choose(row, some.logits.data(), some.logits.size(), some.tokens.data(), position)];
  }
  float const* const choices = processed(result.last(), result.vocabulary);
  LogitsRow const row(choices, result.vocabulary);
  auto const id = static_cast<std::int64_t>(choose(row, choices, result.vocabulary, nullptr, position));
  if (processing_) processing_->accept(id);
  return id;
}

std::optional<LikelyDraft> Sampler::draft(float const* logits, std::vector<std::int64_t> const& tokens,
                                          std::size_t vocabulary, std::size_t ahead) {
  constexpr float kLeft = -1e30f;  // in place of the logits of other tokens, finite for hooks
  std::int64_t const* ids = tokens.data();
  std::size_t count = tokens.size();
  // A drafter that overflows drafts nothing; only the model's own logits are an error.
  if (!std::all_of(logits, logits + count, [](float logit) { return std::isfinite(logit); })) return std::nullopt;
  if (processing_) {
    all_.assign(vocabulary, kLeft);
    for (std::size_t i = 0; i < count; ++i) all_[static_cast<std::size_t>(tokens[i])] = logits[i];
    try {
      logits = processed(all_.data(), vocabulary);
    } catch (ConstraintError const&) {
      return std::nullopt;
    }
    ids = nullptr;
    count = vocabulary;
  }
  LogitsRow const row(logits, count);
  if (row.most() <= kLeft / 2) return std::nullopt;
  bool const all = !greedy() && config_.top_k == 0 && config_.min_p <= 0 && config_.top_p >= 1;
  std::size_t const index = all ? draw_likely(row, logits, ids, length_ + ahead)
                                : choose(row, logits, count, ids, length_ + ahead);
  std::int64_t const id = ids == nullptr ? static_cast<std::int64_t>(index) : ids[index];
  double const temperature = greedy() ? 1 : std::clamp(config_.temperature, kTiny, kHuge);
  double const confidence = std::exp((logits[index] - row.most()) / temperature) / row.sum(temperature);
  if (processing_) processing_->accept(id);
  return LikelyDraft{id, confidence};
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
  auto const wrong = [](float logit) { return std::isnan(logit) || logit == std::numeric_limits<float>::infinity(); };
  float const* const found = std::find_if(changed, changed + vocabulary, wrong);
  if (found != changed + vocabulary) {
    throw ConstraintError("logits_processor or logit_bias makes the logit of token " + std::to_string(found - changed) + " " +
                          shown(double{*found}) + ": give numbers, or -inf where the token may not follow");
  }
  if (!std::isfinite(*std::max_element(changed, changed + vocabulary))) {
    throw ConstraintError("logits_processor, logit_bias and grammar leave no token with a finite logit");
  }
  return changed;
}

}  // namespace tide

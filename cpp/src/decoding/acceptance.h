// Estimates the gain and cost of drafts from earlier verifications.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tide {

constexpr std::size_t kMaxNgram = 3;  // length of the longest n-gram that prompt lookup matches

// The source of a draft after a match of `length` tokens which the same token followed `agreements` times more.
std::size_t ngram_source(std::size_t length, std::int64_t agreements);

// Lower ends of the intervals of confidence whose drafts are counted together, those of tide_export/routers/drafter_weights.py.
constexpr std::array<double, 8> kConfidences{0, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9};

// The interval of a drafter's draft with this confidence.
std::size_t confidence_source(double confidence);

// What drafts of one kind may still lose, in what a step costs a sequence, over all sequences of an engine. Every sequence and
// every token adds a little; what drafts saved counts as well. May be used by several threads at once.
class Balance {
 public:
  double steps() const noexcept { return steps_.load(std::memory_order_relaxed); }

  void begin() noexcept;  // another sequence

  // Adds what a verification gained; the sequence grew by `tokens`.
  void settle(double gained, std::size_t tokens) noexcept;

 private:
  void add(double steps) noexcept;

  std::atomic<double> steps_{0.5};
};

struct Balances {
  void begin() noexcept {
    for (Balance* const each : {&exits, &ngrams, &learned}) each->begin();
  }

  Balance exits, ngrams, learned;  // by kind of draft; `ngrams`: of all text
};

// Estimated shares of drafts that are accepted, by source.
class Acceptance {
 public:
  // The shares to begin with.
  explicit Acceptance(std::vector<double> const& shares);

  static Acceptance of_ngrams();

  // Estimated probability that the next draft of a source is accepted if those before it are.
  double of(std::size_t source) const { return accepted_[source] / drafted_[source]; }

  // Adds what a verification said of a draft of a source, before which no draft was rejected.
  void record(std::size_t source, bool accepted);

  // Counts a draft of a source that was made, whether or not it is verified.
  void count(std::size_t source);

  // The mean of `value` of the share that is accepted, over the sources in the proportions that were counted.
  template <typename Value>
  double mean(Value const& value) const {
    double sum = 0, all = 0;
    for (std::size_t source = 0; source < made_.size(); ++source) {
      sum += made_[source] * value(of(source));
      all += made_[source];
    }
    return sum / all;
  }

 private:
  std::vector<double> accepted_, drafted_, made_;
};

}  // namespace tide

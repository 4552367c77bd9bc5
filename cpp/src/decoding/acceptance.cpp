#include "decoding/acceptance.h"

#include <algorithm>
#include <array>

namespace tide {
namespace {

constexpr std::int64_t kAgreements = 2;
constexpr std::array<std::array<double, kAgreements + 1>, kMaxNgram> kNgramShares{
    {{0.17, 0.42, 0.76}, {0.42, 0.62, 0.88}, {0.54, 0.75, 0.9}}};
constexpr double kWeight = 12.0, kDecay = 0.97;
constexpr double kMaxBalance = 4.0;
constexpr double kOfSequence = 0.15, kOfToken = 0.0025;  // what each adds

}  // namespace

std::size_t ngram_source(std::size_t length, std::int64_t agreements) {
  return (length - 1) * (kAgreements + 1) + static_cast<std::size_t>(std::min(agreements, kAgreements));
}

std::size_t confidence_source(double confidence) {
  auto const above = std::upper_bound(kConfidences.begin() + 1, kConfidences.end(), confidence);
  return static_cast<std::size_t>(above - kConfidences.begin()) - 1;
}

void Balance::begin() noexcept { add(kOfSequence); }

void Balance::settle(double gained, std::size_t tokens) noexcept { add(gained + kOfToken * static_cast<double>(tokens)); }

void Balance::add(double steps) noexcept {
  double before = this->steps();
  while (!steps_.compare_exchange_weak(before, std::min(before + steps, kMaxBalance), std::memory_order_relaxed)) {
  }
}

Acceptance::Acceptance(std::vector<double> const& shares) : drafted_(shares.size(), kWeight), made_(shares.size(), 1.0) {
  for (double const share : shares) accepted_.push_back(share * kWeight);
}

Acceptance Acceptance::of_ngrams() {
  std::vector<double> all;
  for (auto const& shares : kNgramShares) all.insert(all.end(), shares.begin(), shares.end());
  return Acceptance(all);
}

void Acceptance::count(std::size_t source) {
  for (double& made : made_) made *= kDecay;
  made_[source] += 1.0;
}

void Acceptance::record(std::size_t source, bool accepted) {
  accepted_[source] = accepted_[source] * kDecay + (accepted ? 1.0 : 0.0);
  drafted_[source] = drafted_[source] * kDecay + 1.0;
}

}  // namespace tide

#include "decoding/acceptance.h"

#include <algorithm>
#include <array>

namespace tide {
namespace {

constexpr std::int64_t kAgreements = 2;
constexpr std::array<std::array<double, kAgreements + 1>, kMaxNgram> kNgramShares{
    {{0.17, 0.42, 0.76}, {0.42, 0.62, 0.88}, {0.54, 0.75, 0.9}, {0.7, 0.85, 0.94}}};
constexpr double kExitShare = 0.6, kWeight = 12.0, kExitWeight = 4.0, kDecay = 0.97, kMinExitShare = 0.45;

}  // namespace

std::size_t ngram_source(std::size_t length, std::int64_t agreements) {
  return 1 + (length - 1) * (kAgreements + 1) + static_cast<std::size_t>(std::min(agreements, kAgreements));
}

Acceptance::Acceptance() : accepted_{kExitShare * kExitWeight}, drafted_{kExitWeight} {
  for (auto const& shares : kNgramShares) {
    for (double const share : shares) {
      accepted_.push_back(share * kWeight);
      drafted_.push_back(kWeight);
    }
  }
}

bool Acceptance::exits_pay() const { return of(kExits) >= kMinExitShare; }

void Acceptance::record(std::vector<std::size_t> const& sources, std::size_t accepted) {
  for (std::size_t i = 0; i < std::min(sources.size(), accepted + 1); ++i) {
    accepted_[sources[i]] = accepted_[sources[i]] * kDecay + (i < accepted ? 1.0 : 0.0);
    drafted_[sources[i]] = drafted_[sources[i]] * kDecay + 1.0;
  }
}

}  // namespace tide

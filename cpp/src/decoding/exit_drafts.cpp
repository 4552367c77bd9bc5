#include "decoding/exit_drafts.h"

#include <algorithm>
#include <cmath>

#include "decoding/acceptance.h"
#include "tide/manifest.h"

namespace tide {
namespace {

constexpr std::size_t kScoreIntervals = kConfidences.size();
constexpr double kPrior = 4;           // drafts that the share expected of a kind counts as
constexpr double kUntried = 0.3;       // share expected of a score of 0
constexpr double kHopeful = 0.75;      // the same while exploring; of a score of 1 it is 1
constexpr double kRemembered = 0.995;  // of drafts so far, at each choice: what was unlucky is tried again
constexpr double kSeenKept = 0.99;     // of a checkpoint's scores so far, at each new one
constexpr float kAnyScore = -1;

}  // namespace

std::size_t ExitShares::kind(std::size_t checkpoint, double score) {
  return checkpoint * kScoreIntervals + confidence_source(score);
}

ExitShares::Counts& ExitShares::at(std::size_t kind) {
  if (kind >= counts_.size()) counts_.resize((kind / kScoreIntervals + 1) * kScoreIntervals);
  return counts_[kind];
}

double ExitShares::share(std::size_t kind, bool explores) {
  double expected = kUntried;  // of a higher score what lower ones showed, at least
  for (std::size_t i = 0; i <= kind % kScoreIntervals; ++i) {
    if (explores) expected = std::max(expected, kHopeful + (1 - kHopeful) * kConfidences[i]);
    Counts const& counts = at(kind - kind % kScoreIntervals + i);
    expected = (counts.accepted + kPrior * expected) / (counts.drafted + kPrior);
  }
  return expected;
}

ExitChoice ExitShares::choose(ExitWorth const& worth, bool explores) {
  std::lock_guard<std::mutex> const lock(mutex_);
  for (Counts& counts : counts_) {
    counts.accepted *= kRemembered;
    counts.drafted *= kRemembered;
  }
  ExitChoice choice{std::vector<float>(worth.costs.size(), static_cast<float>(kNeverExit))};
  bool some = false;
  for (std::size_t k = worth.costs.size(); k-- > 0;) {
    if (worth.thresholds[k] >= 1) continue;
    double expected = 0, seen = 0;
    bool exits = true;  // also with each score above this interval
    for (std::size_t i = kScoreIntervals; i-- > 0;) {
      std::size_t const kind = k * kScoreIntervals + i;
      double const gain = worth.saved * share(kind, explores) - worth.costs[k];
      exits = exits && gain > choice.gain;
      expected += at(kind).seen * (exits ? gain : choice.gain);
      seen += at(kind).seen;
      if (!exits) continue;
      auto const threshold = static_cast<float>(std::max(kConfidences[i], worth.thresholds[k]));
      choice.thresholds[k] = threshold > 0 ? threshold : kAnyScore;
      some = true;
    }
    choice.gain = expected / seen;
  }
  if (!some) choice.thresholds.clear();
  return choice;
}

void ExitShares::see(float const* scores, std::size_t checkpoints) {
  std::lock_guard<std::mutex> const lock(mutex_);
  for (std::size_t k = 0; k < checkpoints; ++k) {
    if (std::isnan(scores[k])) continue;
    for (std::size_t i = 0; i < kScoreIntervals; ++i) at(k * kScoreIntervals + i).seen *= kSeenKept;
    at(kind(k, double{scores[k]})).seen += 1;
  }
}

double ExitShares::of(std::size_t kind) {
  std::lock_guard<std::mutex> const lock(mutex_);
  return share(kind, false);
}

void ExitShares::record(std::size_t kind, bool accepted) noexcept {
  std::lock_guard<std::mutex> const lock(mutex_);
  Counts& counts = counts_[kind];  // `choose` made room for it
  counts.accepted += accepted ? 1 : 0;
  counts.drafted += 1;
}

}  // namespace tide

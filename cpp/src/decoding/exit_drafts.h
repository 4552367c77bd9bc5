// Decides at which checkpoints a token shall exit, to be a draft.
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

namespace tide {

// What one more draft by an exit is worth, in steps of full depth over one token.
struct ExitWorth {
  double saved = 0;                // by the draft if it is accepted, times the probability that those before it are
  std::vector<double> costs;       // of making and verifying it, at each checkpoint
  std::vector<double> thresholds;  // scores at or below these shall not exit
};

struct ExitChoice {
  std::vector<float> thresholds;  // one per checkpoint; empty: no exit is expected to pay
  double gain = 0;                // expected
};

// How often drafts by exits are accepted, by checkpoint and interval of the router's score: one that is this sure says little
// until it was tried. Known to all sequences of an engine; may be used by several threads at once.
class ExitShares {
 public:
  // Chooses where to exit by optimal stopping: at a checkpoint whose draft is expected to gain more than those after it, which
  // scores reach as often as they did. explores: whether to expect much of what was hardly tried.
  ExitChoice choose(ExitWorth const& worth, bool explores);

  // The kind of a draft that exited at a checkpoint with this score.
  static std::size_t kind(std::size_t checkpoint, double score);

  // Notes the scores of the checkpoints that a step came to; NaN: there is none.
  void see(float const* scores, std::size_t checkpoints);

  double of(std::size_t kind);  // without exploring: little of what was hardly tried
  void record(std::size_t kind, bool accepted) noexcept;

 private:
  struct Counts {
    double accepted = 0, drafted = 0;
    double seen = 1;  // scores
  };

  Counts& at(std::size_t kind);
  double share(std::size_t kind, bool explores);

  std::mutex mutex_;
  std::vector<Counts> counts_;  // by kind, as far as they were asked for
};

}  // namespace tide

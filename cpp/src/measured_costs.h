// Measures what steps cost on this machine, for lossless mode, and keeps it in the user's cache.
//
// Whether a draft pays is decided by these costs, on which tokens never depend. They are measured when they are first asked
// for, in two seconds and a step or less: an engine that drafts nothing does not pay. `CostCorrection` corrects them.
#pragma once

#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "decoding/cost_correction.h"

namespace tide {

class Backend;

// May be used by several threads at once.
class MeasuredCosts {
 public:
  struct Found {
    StepCosts costs;
    char const* source;  // "measured", "cache" of an earlier measurement, or "assumed"
  };

  // Whether the user asked for costs that are assumed, so that the same is drafted each time. Throws GenerationError: the
  // environment variable TIDE_DRAFT_COSTS is neither "assumed" nor empty.
  static bool are_assumed();

  // Lets costs be kept in the user's cache. how: what they depend on beside the bundle and the machine: threads or GPU.
  void keep_as(std::string how) { how_ = std::move(how); }

  // The costs as they are now. The first call measures them, unless the cache has them. Where no step can be run they are
  // assumed. Throws what `are_assumed` does.
  Found now(Backend& backend);

  // As `CostCorrection`; nothing of costs that were never asked for, or are assumed.
  void ran(std::size_t tokens, double seconds) noexcept;
  void exited(std::size_t checkpoint, double seconds) noexcept;
  void drafted(double seconds) noexcept;

  // Keeps costs that many steps have corrected.
  void save() const noexcept;

 private:
  Found find(Backend& backend);
  template <typename Correct>
  void correct(Correct const& correct) noexcept;

  std::mutex finding_;
  std::optional<std::string> how_;  // none: they are not kept
  std::filesystem::path file_;      // empty: the same
  std::string key_;                 // of all that the costs depend on

  mutable std::mutex mutex_;  // of what follows
  std::optional<Found> found_;
  CostCorrection correction_;
};

}  // namespace tide

// How launches of TideExit are divided into blocks: host code that needs no CUDA, for who launches the kernel.
#pragma once

#include <algorithm>
#include <cstdint>

#include "args.h"

namespace tide::exits {

constexpr int kSlots = 4;             // of a group
constexpr int kWarps = TIDE_BLOCK_THREADS / 32, kTile = 128;  // columns of a unit
constexpr int kDeep = 8;              // rows that a thread reads at a time
constexpr int kRows = kDeep * kWarps;  // that a block does
constexpr int kSums = kSlots * kTile;  // of a unit

constexpr int64_t kLargest = 1 << 18;  // of sizes, so that a launch's blocks can be counted in int
constexpr int64_t kGroups = 64;        // of a launch; more are more launches
constexpr int64_t kRouterUnits = 132;  // of a group, about: multiprocessors of a large GPU

// A block's shared memory, in floats.
constexpr int kX = 0, kPartial = kX + kRows * kSlots, kFolded = kPartial + kWarps * kSums,
              kMoments = kFolded + TIDE_BLOCK_THREADS * 3, kVerdicts = kMoments + kSlots * 2, kSaid = kVerdicts + kSlots,
              kShared = kSaid + 4;
static_assert(kShared * sizeof(float) <= 48 * 1024, "what a block may have unasked");

// The kernels by type of the states, in the order of TideType.
constexpr char const* kKernels[] = {"tide_exit_float32", "tide_exit_float16", "tide_exit_bfloat16"};

// How a launch is divided. A group's division depends on the sizes of the matrices alone, and so do its sums.
struct Plan {
  int32_t down_units, up_units, router_units, units;  // of a group: of the lens's matmuls, of the router's, all
  int32_t down_ranges, ranges, rows;  // of the rows of the lens's first matrix; of the router's, and rows of each
  int32_t shortlist_tiles;            // columns of the shortlist come before the bottleneck's
  int64_t states, products, size;     // floats of a group's workspace: the lens's sums, states after it, router's sums
  int64_t first_group;
  float* workspace;
  unsigned* counters;  // the blocks' numbers; by group, units done of each sort
};

// Blocks needed for `count` items, `each` to a block.
inline int64_t blocks_for(int64_t count, int64_t each) { return (count + each - 1) / each; }

inline int32_t units_for(int64_t count, int64_t each) { return static_cast<int32_t>(blocks_for(count, each)); }

inline Plan plan_of(TideExitArgs const& args, void* workspace, uint32_t* counters) {
  Plan plan{};
  plan.shortlist_tiles = units_for(args.shortlist, kTile);
  const int32_t tiles = plan.shortlist_tiles + units_for(args.bottleneck, kTile);
  const int64_t even = blocks_for(blocks_for(args.hidden * tiles, kRouterUnits), kWarps) * kWarps;
  plan.rows = static_cast<int32_t>(std::min<int64_t>(even, kRows));
  plan.ranges = units_for(args.hidden, plan.rows);
  plan.router_units = plan.ranges * tiles;
  if (args.lens_rank > 0) {
    plan.down_ranges = units_for(args.hidden, kRows);
    plan.down_units = plan.down_ranges * units_for(args.lens_rank, kTile);
    plan.up_units = units_for(args.hidden, kTile);
  }
  plan.units = plan.down_units + plan.up_units + plan.router_units;
  plan.states = int64_t{plan.down_units} * kSums;
  plan.products = plan.states + (args.lens_rank > 0 ? args.hidden * kSlots : 0);
  plan.size = plan.products + int64_t{plan.router_units} * kSums;
  plan.workspace = static_cast<float*>(workspace);
  plan.counters = counters;
  return plan;
}

// Bytes of workspace, as tide_exit_workspace.
inline int64_t workspace_bytes(TideExitArgs const& args) {
  const int64_t groups = std::min(blocks_for(args.slots, kSlots), kGroups);
  return groups * plan_of(args, nullptr, nullptr).size * int64_t{sizeof(float)};
}

inline bool known_type(int32_t type) { return type >= TIDE_FLOAT32 && type <= TIDE_BFLOAT16; }

// Whether sizes and types are some that the kernel takes.
inline bool usable(TideExitArgs const& args) {
  const TideNormArgs& norm = args.norm;
  return args.slots >= 0 && args.slots <= INT32_MAX && args.tokens > 0 && args.hidden > 0 && args.hidden <= kLargest &&
         args.exit_rows > 0 && args.bottleneck > 0 && args.bottleneck <= kLargest && args.shortlist >= 0 &&
         args.shortlist != 1 && args.shortlist <= kLargest && args.lens_rank >= 0 && args.lens_rank <= kLargest &&
         known_type(args.states_type) &&
         (norm.kind == TIDE_NORM_NONE || norm.kind == TIDE_NORM_RMS || norm.kind == TIDE_NORM_LAYER);
}

// Calls launch(blocks, plan) for each launch, of TIDE_BLOCK_THREADS threads and kShared floats of memory a block, until one
// returns another number than 0; returns that.
template <class Launch>
int launch_all(TideExitArgs const& args, void* workspace, uint32_t* counters, Launch launch) {
  const int64_t groups = blocks_for(args.slots, kSlots);
  Plan plan = plan_of(args, workspace, counters);
  int status = 0;
  for (; plan.first_group < groups && status == 0; plan.first_group += kGroups) {
    status = launch(static_cast<unsigned>(std::min(groups - plan.first_group, kGroups) * plan.units), plan);
  }
  return status;
}

}  // namespace tide::exits

// One launch. A team of blocks takes four slots, a block a share of the channels; the blocks exchange sums of the lens's
// inner states, of the norm and of the router's matmuls, and the verdicts.
#include "tide_exit/kernel.cuh"

#include "common/arithmetic.h"
#include "tide_exit/multiply.cuh"

namespace tide {
namespace {

constexpr int64_t kLargest = 1 << 24;  // of sizes that are counted in int
constexpr int kFolded = 128;  // threads that go through the router's rest

template <class T>
struct Exit {
  using Args = TideExitArgs;

  // A block's region, in floats.
  struct Region {
    int64_t low, moments, products, verdicts, size;
  };
  static TIDE_BOTH Region region_of(const Args& args) {
    const int64_t moments = args.lens_rank * kSlots, products = moments + kSlots * 3;
    const int64_t verdicts = products + (args.bottleneck + args.shortlist) * kSlots;
    return {0, moments, products, verdicts, blocks_for(verdicts + kSlots, 4) * 4};
  }

  // Channels of a block: a multiple of 8.
  static TIDE_BOTH int64_t share_of(const Args& args, int blocks) { return blocks_for(args.hidden, 8 * blocks) * 8; }

  static Sizes sizes(const Args& args, int blocks) {
    return {region_of(args).size, share_of(args, blocks) * kSlots + args.lens_rank * kSlots + kPartialSums};
  }

  static TIDE_BOTH int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

  // A block's view of its group of slots. Arrays of channels are [share][kSlots].
  struct Group {
    const Args& args;
    const Region region;
    const int64_t first;         // slot
    const int64_t begin;  // channel
    const int count;      // of channels
    float* const x;
    float* const low;  // [lens_rank][kSlots]
    float* const scratch;

    TIDE_DEVICE Group(Block& block, const Args& arguments, int64_t group)
        : args(arguments),
          region(region_of(arguments)),
          first(group * kSlots),
          begin(block.rank * share_of(arguments, block.blocks)),
          count(begin < arguments.hidden
                    ? static_cast<int>(smaller(arguments.hidden - begin, share_of(arguments, block.blocks)))
                    : 0),
          x(block.shared),
          low(x + share_of(arguments, block.blocks) * kSlots),
          scratch(low + arguments.lens_rank * kSlots) {}
  };

  static TIDE_DEVICE void run(Team& team, const Args& args) {
    team.wait_for_inputs();
    // Every team goes round as often as any, because a barrier may be one of all teams.
    for (int64_t first = 0; first * kSlots < args.slots; first += team.count) {
      const int64_t group = first + team.number;
      team.stage([&](Block& block) {
        Group of(block, args, group);
        gather(block, of);
        if (args.lens_rank > 0)
          lens_down(block, of);
        else
          moments(block, of);
      });
      if (args.lens_rank > 0)
        team.stage([&](Block& block) {
          Group of(block, args, group);
          lens_up(block, of);
          moments(block, of);
        });
      team.stage([&](Block& block) {
        Group of(block, args, group);
        normalize(block, of);
        products(block, of);
      });
      team.stage([&](Block& block) {
        Group of(block, args, group);
        for (int slot = block.rank; slot < kSlots && of.first + slot < args.slots; slot += block.blocks)
          decide(block, of, slot);
      });
      team.last_stage([&](Block& block) { scatter(block, Group(block, args, group)); });
    }
  }

  static TIDE_DEVICE void gather(Block& block, const Group& of) {
    const Args& args = of.args;
    block.phase([&](int thread) {
      for (int slot = 0; slot < kSlots; ++slot) {
        const bool is_slot = of.first + slot < args.slots;
        const int64_t token = is_slot ? (of.first + slot) * args.tokens + args.last_tokens[of.first + slot] : 0;
        const T* state = static_cast<const T*>(args.states) + token * args.hidden + of.begin;
        for (int64_t i = thread; i < of.count; i += kThreads) of.x[i * kSlots + slot] = is_slot ? to_float(state[i]) : 0.0f;
      }
    });
  }

  static TIDE_DEVICE void lens_down(Block& block, const Group& of) {
    const auto rank = static_cast<int>(of.args.lens_rank);
    float* low = block.region(block.rank) + of.region.low;
    multiply(block, of.x, of.count, static_cast<const T*>(of.args.lens_down) + of.begin * rank, rank, rank, of.scratch,
             [&](int slot, int column, float sum) { low[column * kSlots + slot] = sum; });
  }

  static TIDE_DEVICE void lens_up(Block& block, const Group& of) {
    const Args& args = of.args;
    block.phase([&](int thread) {
      for (int64_t i = thread; i < args.lens_rank * kSlots; i += kThreads)
        of.low[i] = rounded<T>(sum_of_team(block, of.region.low + i));
    });
    multiply(block, of.low, static_cast<int>(args.lens_rank), static_cast<const T*>(args.lens_up) + of.begin, args.hidden, of.count,
             of.scratch, [&](int slot, int channel, float sum) {
               of.x[channel * kSlots + slot] += sum + to_float(static_cast<const T*>(args.lens_bias)[of.begin + channel]);
             });
  }

  // Puts the moments of the block's channels into its region; RMSNorm's are those about 0.
  static TIDE_DEVICE void moments(Block& block, const Group& of) {
    const int32_t kind = of.args.norm.kind;
    if (kind == TIDE_NORM_NONE) return;
    float* mean = of.scratch + kThreads;  // [kSlots]
    const auto sum = [&](auto value) {
      block.phase([&](int thread) {
        float total = 0.0f;
        for (int64_t i = thread; i < of.count * kSlots; i += kThreads) total += value(of.x[i], thread % kSlots);
        of.scratch[thread] = total;
      });
      fold<kThreads, kSlots>(block, of.scratch, [](float a, float b) { return a + b; });
    };
    if (kind == TIDE_NORM_LAYER) sum([](float x, int) { return x; });
    block.phase([&](int thread) {
      if (thread < kSlots)
        mean[thread] = kind == TIDE_NORM_LAYER && of.count > 0 ? of.scratch[thread] / static_cast<float>(of.count) : 0.0f;
    });
    sum([&](float x, int slot) { return (x - mean[slot]) * (x - mean[slot]); });
    block.last_phase([&](int thread) {
      if (thread >= kSlots) return;
      float* own = block.region(block.rank) + of.region.moments + thread * 3;
      own[0] = static_cast<float>(of.count);
      own[1] = mean[thread];
      own[2] = of.scratch[thread];
    });
  }

  // Replaces x by what the head reads.
  static TIDE_DEVICE void normalize(Block& block, const Group& of) {
    const TideNormArgs& norm = of.args.norm;
    if (norm.kind != TIDE_NORM_NONE) {
      float* parts = of.scratch + kSlots * 2;  // [blocks][kSlots]: the moments of every block
      static_assert(kMaxBlocks * kSlots * 3 <= kThreads, "a thread fetches one number");
      block.phase([&](int thread) {
        if (thread < block.blocks * kSlots * 3)
          parts[thread] = block.region(thread / (kSlots * 3))[of.region.moments + thread % (kSlots * 3)];
      });
      block.phase([&](int thread) {
        if (thread >= kSlots) return;
        const Moments all = merged(parts + thread * 3, block.blocks, kSlots * 3);
        of.scratch[thread * 2] = all.mean;
        of.scratch[thread * 2 + 1] = 1.0f / sqrtf(all.squares / all.count + norm.epsilon);
      });
    }
    block.phase([&](int thread) {
      const T* scale = static_cast<const T*>(norm.scale) + of.begin;
      const T* shift = norm.shift == nullptr ? nullptr : static_cast<const T*>(norm.shift) + of.begin;
      for (int64_t i = thread; i < of.count * kSlots; i += kThreads) {
        float value = of.x[i];
        if (norm.kind != TIDE_NORM_NONE) {
          value = (value - of.scratch[i % kSlots * 2]) * of.scratch[i % kSlots * 2 + 1] * to_float(scale[i / kSlots]);
          if (shift != nullptr) value += to_float(shift[i / kSlots]);
        }
        of.x[i] = rounded<T>(value);
      }
    });
  }

  // Of the block's channels with the router's first matrix and the shortlist, into its region: [kSlots][both's columns].
  static TIDE_DEVICE void products(Block& block, const Group& of) {
    const Args& args = of.args;
    const auto bottleneck = static_cast<int>(args.bottleneck), shortlist = static_cast<int>(args.shortlist);
    const int columns = bottleneck + shortlist;
    float* own = block.region(block.rank) + of.region.products;
    multiply(block, of.x, of.count, args.down + of.begin * bottleneck, bottleneck, bottleneck, of.scratch,
             [&](int slot, int column, float sum) { own[slot * columns + column] = sum; });
    own += bottleneck;
    multiply(block, of.x, of.count, args.shortlist_weight + of.begin * shortlist, shortlist, shortlist, of.scratch,
             [&](int slot, int column, float sum) { own[slot * columns + column] = sum; });
  }

  // The small rest of the router for one slot; tells every block of the team.
  static TIDE_DEVICE void decide(Block& block, const Group& of, int slot) {
    const Args& args = of.args;
    const int64_t products = of.region.products + slot * (args.bottleneck + args.shortlist);
    const auto product = [&](int64_t column) { return sum_of_team(block, products + column); };
    float first = 0.0f, second = 0.0f;
    if (args.shortlist > 0) {
      TopTwo* top = reinterpret_cast<TopTwo*>(of.scratch);
      block.phase([&](int thread) {
        if (thread >= kFolded) return;
        TopTwo seen = empty_top_two();
        for (int64_t i = thread; i < args.shortlist; i += kFolded) seen = with(seen, product(args.bottleneck + i));
        top[thread] = seen;
      });
      fold<kFolded, 1>(block, top, [](TopTwo a, TopTwo b) { return merged(a, b); });
      first = first_log_probability(top[0]);
      second = second_log_probability(top[0]);
      block.phase([](int) {});  // all have read top[0] before `sums`, which is in the same memory, is written
    }
    float* sums = of.scratch;
    block.phase([&](int thread) {
      if (thread >= kFolded) return;
      float sum = 0.0f;
      for (int64_t i = thread; i < args.bottleneck; i += kFolded) {
        float z = product(i);
        if (args.shortlist > 0) z += first * args.confidence[i] + second * args.confidence[args.bottleneck + i];
        sum += silu(z) * args.up[i];
      }
      sums[thread] = sum;
    });
    fold<kFolded, 1>(block, sums, [](float a, float b) { return a + b; });
    block.phase([&](int thread) {
      if (thread >= block.blocks) return;
      const float score = sigmoid(sums[0] + args.bias[0]);
      const bool exits = score > args.thresholds[of.first + slot];
      block.region(thread)[of.region.verdicts + slot] = exits ? 1.0f : 0.0f;
      if (thread != 0) return;
      args.scores[of.first + slot] = score;
      args.exits[of.first + slot] = exits;
    });
  }

  // A thread takes the channels that it takes in `gather`, with which the team's next group begins, without a barrier.
  static TIDE_DEVICE void scatter(Block& block, const Group& of) {
    const Args& args = of.args;
    const float* verdicts = block.region(block.rank) + of.region.verdicts;
    block.last_phase([&](int thread) {
      for (int slot = 0; slot < kSlots && of.first + slot < args.slots; ++slot) {
        if (verdicts[slot] == 0.0f) continue;
        T* row = static_cast<T*>(args.exit_states) + (of.first + slot) * args.exit_rows * args.hidden + of.begin;
        for (int64_t i = thread; i < of.count; i += kThreads) row[i] = from_float<T>(of.x[i * kSlots + slot]);
      }
    });
  }

  // The sum of what every block of the team has at `index` of its region, in order.
  static TIDE_DEVICE float sum_of_team(const Block& block, int64_t index) {
    float sum = 0.0f;
    TIDE_UNROLL_BY_16
    for (int rank = 0; rank < block.blocks; ++rank) sum += block.region(rank)[index];
    return sum;
  }
};

bool usable(const TideExitArgs& args) {
  const TideNormArgs& norm = args.norm;
  return args.slots >= 0 && args.slots <= INT32_MAX / kMaxBlocks && args.tokens > 0 && args.hidden > 0 &&
         args.hidden <= kLargest && args.exit_rows > 0 && args.bottleneck > 0 && args.bottleneck <= kLargest &&
         args.shortlist >= 0 && args.shortlist != 1 && args.shortlist <= kLargest && args.lens_rank >= 0 &&
         args.lens_rank <= kLargest && known_type(args.states_type) &&
         (norm.kind == TIDE_NORM_NONE || norm.kind == TIDE_NORM_RMS || norm.kind == TIDE_NORM_LAYER);
}

bool complete(const TideExitArgs& args) {
  return args.states && args.last_tokens && args.thresholds && args.down && args.up && args.bias && args.exit_states &&
         args.scores && args.exits && (args.norm.kind == TIDE_NORM_NONE || args.norm.scale) &&
         (args.shortlist == 0 || (args.shortlist_weight && args.confidence)) &&
         (args.lens_rank == 0 || (args.lens_down && args.lens_up && args.lens_bias));
}

}  // namespace
}  // namespace tide

extern "C" int64_t tide_exit_workspace(const TideExitArgs* args) {
  using namespace tide;
  return exchange_bytes(blocks_for(args->slots, kSlots), Exit<float>::sizes(*args, kMaxBlocks));
}

extern "C" cudaError_t tide_exit(const TideExitArgs* args, void* workspace, int64_t workspace_bytes,
                                 cudaStream_t stream) {
  using namespace tide;
  if (args == nullptr || !usable(*args)) return cudaErrorInvalidValue;
  if (args->slots == 0) return cudaSuccess;
  if (!complete(*args) || workspace == nullptr || workspace_bytes < tide_exit_workspace(args))
    return cudaErrorInvalidValue;
  const int64_t groups = blocks_for(args->slots, kSlots);
  if (args->states_type == TIDE_FLOAT32) return launch<Exit<float>>(*args, groups, workspace, stream);
  if (args->states_type == TIDE_FLOAT16) return launch<Exit<__half>>(*args, groups, workspace, stream);
  return launch<Exit<__nv_bfloat16>>(*args, groups, workspace, stream);
}

// One launch over the whole GPU. The work on a group of four slots is divided into units, a block each: of the lens's first
// matmul, of its second, and of the router's. A block that needs all units of one sort waits for them; the last of the
// router's to end adds up what they found, decides and writes.
#include "tide_exit/kernel.cuh"

#include "common/arithmetic.h"
#include "tide_exit/unit.cuh"

namespace tide {
namespace {

template <class T>
struct Exit {
  using Args = TideExitArgs;
  enum Counter { kDown, kUp, kRouter, kOfGroup };  // those of a group, after the launch's one
  static_assert(TIDE_EXIT_COUNTERS == 1 + kGroups * kOfGroup, "all of a launch's");

  // A block's view of its group of slots.
  struct Group {
    const Args& args;
    const Plan& plan;
    const int64_t first;  // slot
    const int slots;
    float* const units;      // the lens's sums
    float* const states;     // [slots][hidden], after the lens
    float* const products;   // the router's sums
    unsigned* const done;    // counters
    float* const x;
    float* const partial;
    float* const folded;
    float* const moments;  // mean and 1 / deviation of each slot
    unsigned* const said;

    TIDE_DEVICE Group(Block& block, const Args& arguments, const Plan& division, int64_t group)
        : args(arguments),
          plan(division),
          first((division.first_group + group) * kSlots),
          slots(static_cast<int>(arguments.slots - first < kSlots ? arguments.slots - first : kSlots)),
          units(division.workspace + group * division.size),
          states(units + division.states),
          products(units + division.products),
          done(division.counters + 1 + group * kOfGroup),
          x(block.shared + kX),
          partial(block.shared + kPartial),
          folded(block.shared + kFolded),
          moments(block.shared + kMoments),
          said(reinterpret_cast<unsigned*>(block.shared + kSaid)) {}

    // A slot's state as the segment left it.
    TIDE_DEVICE const T* given(int slot) const {
      const int64_t token = (first + slot) * args.tokens + args.last_tokens[first + slot];
      return static_cast<const T*>(args.states) + token * args.hidden;
    }
  };

  static TIDE_DEVICE void run(Block& block, const Args& args, const Plan& plan) {
    // Without a lens no block waits.
    unsigned* said = reinterpret_cast<unsigned*>(block.shared + kSaid) + 1;
    const unsigned number = args.lens_rank > 0 ? number_of(block, plan.counters, said) : blockIdx.x;
    const Group of(block, args, plan, number / static_cast<unsigned>(plan.units));
    const int unit = static_cast<int>(number % static_cast<unsigned>(plan.units));
    const int router = unit - plan.down_units - plan.up_units;
    if (unit < plan.down_units) return lens_down(block, of, unit);
    if (router < 0) return lens_up(block, of, unit - plan.down_units);
    if (args.lens_rank > 0)
      route(block, of, router, [&](int slot) { return of.states + slot * args.hidden; });
    else
      route(block, of, router, [&](int slot) { return of.given(slot); });
  }

  static TIDE_DEVICE int smaller(int64_t a, int b) { return a < b ? static_cast<int>(a) : b; }

  // Rows of x that are channels from `begin` on: value(slot, channel), 0 where there is none.
  template <class Value>
  static TIDE_DEVICE void fill(Block& block, const Group& of, int64_t begin, int rows, Value value) {
    block.phase([&](int thread) {
      const int slot = thread % kSlots, row = thread / kSlots;
      of.x[thread] = slot < of.slots && row < rows ? value(slot, begin + row) : 0.0f;
    });
  }

  static TIDE_DEVICE void lens_down(Block& block, const Group& of, int unit) {
    const Args& args = of.args;
    const int tile = unit / of.plan.down_ranges * kTile;
    const int64_t begin = int64_t{unit % of.plan.down_ranges} * kRows;
    const int rows = smaller(args.hidden - begin, kRows), columns = smaller(args.lens_rank - tile, kTile);
    const T* weights = static_cast<const T*>(args.lens_down) + begin * args.lens_rank + tile;
    const auto states = [&](int) {
      fill(block, of, begin, rows, [&](int slot, int64_t i) { return to_float(of.given(slot)[i]); });
    };
    multiply(block, weights, args.lens_rank, columns, rows, of.x, of.partial, states, [&](int slot, int column, float sum) {
      if (slot < of.slots) of.units[int64_t{unit} * kSums + slot * kTile + column] = sum;
    });
    publish(block, of.done + kDown, of.said);
  }

  static TIDE_DEVICE void lens_up(Block& block, const Group& of, int unit) {
    const Args& args = of.args;
    const int64_t begin = int64_t{unit} * kTile;
    const auto inner = [&](int row) {
      if (row == 0) await(block, of.done + kDown, static_cast<unsigned>(of.plan.down_units));
      const float* units = of.units + int64_t{row / kTile} * of.plan.down_ranges * kSums;
      add_units(block, units, of.plan.down_ranges, of.slots, of.partial,
                [&](int slot, int column, float sum) { of.x[column * kSlots + slot] = rounded<T>(sum); });
    };
    static_assert(kRows == kTile, "the columns of a unit are the rows that the next matmul takes at a time");
    multiply(block, static_cast<const T*>(args.lens_up) + begin, args.hidden, smaller(args.hidden - begin, kTile),
             static_cast<int>(args.lens_rank), of.x, of.partial, inner, [&](int slot, int column, float sum) {
               const int64_t i = begin + column;
               if (slot >= of.slots || i >= args.hidden) return;
               of.states[slot * args.hidden + i] =
                   to_float(of.given(slot)[i]) + (sum + to_float(static_cast<const T*>(args.lens_bias)[i]));
             });
    publish(block, of.done + kUp, of.said);
  }

  // A unit of the router's matmuls, and the rest where it is the last. state(slot): what the norm takes.
  template <class State>
  static TIDE_DEVICE void route(Block& block, const Group& of, int unit, State state) {
    const Args& args = of.args;
    const Plan& plan = of.plan;
    const int tile = unit / plan.ranges;
    const int64_t begin = int64_t{unit % plan.ranges} * plan.rows;
    const int rows = smaller(args.hidden - begin, plan.rows);
    const bool listed = tile < plan.shortlist_tiles;
    const int64_t width = listed ? args.shortlist : args.bottleneck;
    const int64_t column = int64_t{listed ? tile : tile - plan.shortlist_tiles} * kTile;
    const float* weights = (listed ? args.shortlist_weight : args.down) + begin * width + column;
    const auto normalized = [&](int slot, int64_t i) {
      const float value = to_float(state(slot)[i]);
      return rounded<T>(args.norm.kind == TIDE_NORM_NONE ? value : normal(of, slot, i, value));
    };
    const auto normalize = [&](int) {
      if (args.lens_rank > 0) await(block, of.done + kUp, static_cast<unsigned>(plan.up_units));
      moments(block, of, state);
      fill(block, of, begin, rows, normalized);
    };
    multiply(block, weights, width, smaller(width - column, kTile), rows, of.x, of.partial, normalize,
             [&](int slot, int c, float sum) {
               if (slot < of.slots) of.products[int64_t{unit} * kSums + slot * kTile + c] = sum;
             });
    const auto all = static_cast<unsigned>(plan.router_units);
    if (publish(block, of.done + kRouter, of.said) == all - 1) decide(block, of, normalized);
  }

  // Mean and deviation of each slot's state; RMSNorm's are those about 0.
  template <class State>
  static TIDE_DEVICE void moments(Block& block, const Group& of, State state) {
    const int32_t kind = of.args.norm.kind;
    if (kind == TIDE_NORM_NONE) return;
    const auto hidden = static_cast<float>(of.args.hidden);
    const auto sum = [&](auto value) {
      block.phase([&](int thread) {
        const int slot = thread / kTile, lane = thread % kTile;
        of.folded[lane * kSlots + slot] = slot < of.slots ? sum_of(state(slot), of.args.hidden, lane, [&](float x) {
          return value(slot, x);
        }) : 0.0f;
      });
      fold<kThreads, kSlots>(block, of.folded, [](float a, float b) { return a + b; });
    };
    if (kind == TIDE_NORM_LAYER) sum([](int, float x) { return x; });
    block.phase([&](int thread) {
      if (thread < kSlots) of.moments[thread * 2] = kind == TIDE_NORM_LAYER ? of.folded[thread] / hidden : 0.0f;
    });
    sum([&](int slot, float x) { return (x - of.moments[slot * 2]) * (x - of.moments[slot * 2]); });
    block.phase([&](int thread) {
      if (thread < kSlots) of.moments[thread * 2 + 1] = 1.0f / sqrtf(of.folded[thread] / hidden + of.args.norm.epsilon);
    });
  }

  // Of value(x[i]) over the channels that a lane takes, four at a time.
  template <class X, class Value>
  static TIDE_DEVICE float sum_of(const X* x, int64_t size, int lane, Value value) {
    float sum = 0.0f;
    const bool fours = allows_fours(x, 4, size);
    for (int64_t i = lane * 4; i < size; i += kTile * 4) {
      Four<X> four;
      if (fours) four = *reinterpret_cast<const Four<X>*>(x + i);
      TIDE_UNROLL
      for (int j = 0; j < 4; ++j)
        if (i + j < size) sum += value(to_float(fours ? four.item[j] : x[i + j]));
    }
    return sum;
  }

  static TIDE_DEVICE float normal(const Group& of, int slot, int64_t i, float value) {
    const TideNormArgs& norm = of.args.norm;
    value = (value - of.moments[slot * 2]) * of.moments[slot * 2 + 1] * to_float(static_cast<const T*>(norm.scale)[i]);
    return norm.shift == nullptr ? value : value + to_float(static_cast<const T*>(norm.shift)[i]);
  }

  // The small rest of the router: a thread takes a column of a tile for one slot. normalized(slot, channel): for the head.
  template <class Normalized>
  static TIDE_DEVICE void decide(Block& block, const Group& of, Normalized normalized) {
    const Args& args = of.args;
    const Plan& plan = of.plan;
    const auto products = [&](int tile, auto out) {
      const float* units = of.products + int64_t{tile} * plan.ranges * kSums;
      add_units(block, units, plan.ranges, of.slots, of.partial, out);
    };
    const int thread = static_cast<int>(threadIdx.x), own = thread % kTile * kSlots + thread / kTile;
    float first = 0.0f, second = 0.0f;
    if (args.shortlist > 0) {
      TopTwo seen = empty_top_two();
      for (int tile = 0; tile < plan.shortlist_tiles; ++tile)
        products(tile, [&](int, int column, float sum) {
          if (tile * kTile + column < args.shortlist) seen = with(seen, sum);
        });
      auto* top = reinterpret_cast<TopTwo*>(of.folded);
      block.phase([&](int) { top[own] = seen; });
      fold<kThreads, kSlots>(block, top, [](TopTwo a, TopTwo b) { return merged(a, b); });
      first = first_log_probability(top[thread / kTile]);
      second = second_log_probability(top[thread / kTile]);
    }
    float sum = 0.0f;
    for (int tile = 0; tile * kTile < args.bottleneck; ++tile)
      products(plan.shortlist_tiles + tile, [&](int, int column, float z) {
        const int64_t i = tile * kTile + column;
        if (i >= args.bottleneck) return;
        if (args.shortlist > 0) z += first * args.confidence[i] + second * args.confidence[args.bottleneck + i];
        sum += silu(z) * args.up[i];
      });
    float* verdicts = block.shared + kVerdicts;
    block.phase([&](int) { of.folded[own] = sum; });
    fold<kThreads, kSlots>(block, of.folded, [](float a, float b) { return a + b; });
    block.phase([&](int slot) {
      for (int i = 0; slot == 0 && i < kOfGroup; ++i)
        atomicExch(of.done + i, 0u);
      if (slot >= of.slots) return;
      const float score = sigmoid(of.folded[slot] + args.bias[0]);
      const bool exits = score > args.thresholds[of.first + slot];
      args.scores[of.first + slot] = score;
      args.exits[of.first + slot] = exits;
      verdicts[slot] = exits ? 1.0f : 0.0f;
    });
    block.last_phase([&](int from) {
      for (int slot = 0; slot < of.slots; ++slot) {
        if (verdicts[slot] == 0.0f) continue;
        T* row = static_cast<T*>(args.exit_states) + (of.first + slot) * args.exit_rows * args.hidden;
        for (int64_t begin = from; begin < args.hidden; begin += kDeep * kThreads) {
          float values[kDeep];  // all are read before the first is written
          TIDE_UNROLL
          for (int i = 0; i < kDeep; ++i)
            values[i] = begin + i * kThreads < args.hidden ? normalized(slot, begin + i * kThreads) : 0.0f;
          TIDE_UNROLL
          for (int i = 0; i < kDeep; ++i)
            if (begin + i * kThreads < args.hidden) row[begin + i * kThreads] = from_float<T>(values[i]);
        }
      }
    });
  }
};

bool complete(const TideExitArgs& args) {
  return args.states && args.last_tokens && args.thresholds && args.down && args.up && args.bias && args.exit_states &&
         args.scores && args.exits && (args.norm.kind == TIDE_NORM_NONE || args.norm.scale) &&
         (args.shortlist == 0 || (args.shortlist_weight && args.confidence)) &&
         (args.lens_rank == 0 || (args.lens_down && args.lens_up && args.lens_bias));
}

}  // namespace
}  // namespace tide

// The kernels by type of the states; their names are in plan.h too. The runtime's library holds them as PTX.
#define TIDE_EXIT_KERNEL(name, T)                                                         \
  extern "C" __global__ void __launch_bounds__(tide::kThreads, 1)                         \
      name(const __grid_constant__ TideExitArgs args, const __grid_constant__ tide::exits::Plan plan) { \
    tide::Block block(tide::shared_memory());                                             \
    tide::Exit<T>::run(block, args, plan);                                                \
  }
TIDE_EXIT_KERNEL(tide_exit_float32, float)
TIDE_EXIT_KERNEL(tide_exit_float16, __half)
TIDE_EXIT_KERNEL(tide_exit_bfloat16, __nv_bfloat16)

extern "C" int64_t tide_exit_workspace(const TideExitArgs* args) { return tide::workspace_bytes(*args); }

extern "C" cudaError_t tide_exit(const TideExitArgs* args, void* workspace, int64_t workspace_bytes, uint32_t* counters,
                                 cudaStream_t stream) {
  using namespace tide;
  if (args == nullptr || !usable(*args)) return cudaErrorInvalidValue;
  if (args->slots == 0) return cudaSuccess;
  if (!complete(*args) || workspace == nullptr || workspace_bytes < tide_exit_workspace(args) || counters == nullptr)
    return cudaErrorInvalidValue;
  void (*const kernels[])(TideExitArgs, Plan) = {tide_exit_float32, tide_exit_float16, tide_exit_bfloat16};
  return static_cast<cudaError_t>(launch_all(*args, workspace, counters, [&](unsigned blocks, const Plan& plan) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = kShared * sizeof(float);
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernels[args->states_type], *args, plan);  // its error, not one that was there before
  }));
}

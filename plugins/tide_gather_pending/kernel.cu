// Two launches: the states, a block per new token; then counts and positions, a block per sequence. The second may
// change the counts, because the first has read them.
#include "tide_gather_pending/kernel.cuh"

#include "common/copy.cuh"

namespace tide {
namespace {

using GatherArgs = TideGatherPendingArgs;

TIDE_DEVICE bool takes(const GatherArgs& args, int64_t sequence) {
  return args.take == nullptr || args.take[sequence] != 0;
}

template <class Unit>
struct Append {
  static constexpr int kThreads = 128;
  using Args = GatherArgs;
  struct Shared {
    char unused;
  };
  template <class B>
  static TIDE_DEVICE void run(B& block, Shared&, const Args& args) {
    const int64_t sequence = block.x / args.tokens, token = block.x % args.tokens;
    const int64_t before = args.counts[sequence];
    if (!takes(args, sequence) || before < 0 || before + args.tokens > args.capacity) return;
    const char* source = static_cast<const char*>(args.states) + block.x * args.token_bytes;
    char* target =
        static_cast<char*>(args.pending) + (sequence * args.capacity + before + token) * args.token_bytes;
    block.phase([&](int thread) { copy_row<Unit>(target, source, args.token_bytes, thread, kThreads); });
  }
};

struct Positions {
  static constexpr int kThreads = 128;
  using Args = GatherArgs;
  struct Shared {
    int64_t count;
  };
  template <class B>
  static TIDE_DEVICE void run(B& block, Shared& shared, const Args& args) {
    const int64_t sequence = block.x;
    block.phase([&](int thread) {
      if (thread != 0) return;
      shared.count = args.counts[sequence] + (takes(args, sequence) ? args.tokens : 0);
      args.counts[sequence] = static_cast<int32_t>(shared.count);
    });
    block.phase([&](int thread) {
      for (int64_t i = thread; i < args.capacity; i += kThreads)
        args.positions[sequence * args.capacity + i] =
            i < shared.count ? static_cast<int32_t>(args.lengths[sequence] + i) : -1;
    });
  }
};

bool usable(const GatherArgs& args) {
  return args.batch >= 0 && args.tokens >= 0 && args.capacity >= 0 && args.token_bytes > 0 &&
         args.batch * (args.tokens > 1 ? args.tokens : 1) <= INT32_MAX &&
         (args.batch == 0 || (args.counts && args.lengths)) &&
         (args.batch * args.capacity == 0 || (args.pending && args.positions)) &&
         (args.batch * args.tokens == 0 || args.states);
}

}  // namespace
}  // namespace tide

extern "C" cudaError_t tide_gather_pending(const TideGatherPendingArgs* args, cudaStream_t stream) {
  using namespace tide;
  if (args == nullptr || !usable(*args)) return cudaErrorInvalidValue;
  if (args->batch == 0) return cudaSuccess;
  const dim3 token_grid(static_cast<unsigned>(args->batch * args->tokens)), grid(static_cast<unsigned>(args->batch));
  const cudaError_t status =
      with_copy_unit({args->states, args->pending}, {args->token_bytes},
                     [&](auto unit) { return launch<Append<decltype(unit)>>(token_grid, *args, stream); });
  return status != cudaSuccess ? status : launch<Positions>(grid, *args, stream);
}

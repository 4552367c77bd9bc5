// Three launches: the number of rows that stay in each tile; each row's target index (a scan within the tile, after the
// rows of the tiles before it); the copies. The first is omitted if there is only one tile.
#include "tide_compact/kernel.cuh"

#include "common/copy.cuh"

namespace tide {
namespace {

constexpr int kTile = 1024;  // rows

struct Work {
  TideCompactArgs compact;
  int64_t* tile_counts;  // [tiles], rows that stay
  int64_t* targets;      // [rows], a row's index among those that stay, or -1 - its index among those that leave
};

struct Count {
  static constexpr int kThreads = 256;
  using Args = Work;
  struct Shared {
    int64_t sums[kThreads];
  };
  template <class B>
  static TIDE_DEVICE void run(B& block, Shared& shared, const Args& args) {
    block.phase([&](int thread) {
      int64_t staying = 0;
      for (int i = thread; i < kTile; i += kThreads) {
        const int64_t row = block.x * kTile + i;
        staying += row < args.compact.rows && args.compact.exits[row] == 0;
      }
      shared.sums[thread] = staying;
    });
    fold<kThreads>(block, shared.sums, [](int64_t a, int64_t b) { return a + b; });
    block.phase([&](int thread) {
      if (thread == 0) args.tile_counts[block.x] = shared.sums[0];
    });
  }
};

struct Rank {
  static constexpr int kThreads = 256, kEach = kTile / kThreads;
  using Args = Work;
  struct Shared {
    int64_t before[kThreads];
    int sums[2][kThreads];  // inclusive prefix sums by thread; two, to read one while writing the other
  };
  template <class B>
  static TIDE_DEVICE void run(B& block, Shared& shared, const Args& args) {
    const TideCompactArgs& compact = args.compact;
    const auto stays = [&](int64_t row) { return row < compact.rows && compact.exits[row] == 0; };

    block.phase([&](int thread) {
      int64_t before = 0;
      for (int64_t tile = thread; tile < block.x; tile += kThreads) before += args.tile_counts[tile];
      shared.before[thread] = before;
      int staying = 0;
      for (int i = 0; i < kEach; ++i) staying += stays(block.x * kTile + thread * kEach + i);
      shared.sums[0][thread] = staying;
    });
    fold<kThreads>(block, shared.before, [](int64_t a, int64_t b) { return a + b; });
    int now = 0;
    for (int reach = 1; reach < kThreads; reach *= 2, now = 1 - now) {
      block.phase([&](int thread) {
        shared.sums[1 - now][thread] =
            shared.sums[now][thread] + (thread >= reach ? shared.sums[now][thread - reach] : 0);
      });
    }
    block.phase([&](int thread) {
      int64_t staying = shared.before[0] + (thread > 0 ? shared.sums[now][thread - 1] : 0);
      for (int i = 0; i < kEach; ++i) {
        const int64_t row = block.x * kTile + thread * kEach + i;
        if (row >= compact.rows) break;
        if (stays(row)) {
          compact.staying_rows[staying] = static_cast<int32_t>(row);
          args.targets[row] = staying++;
        } else {
          compact.leaving_rows[row - staying] = static_cast<int32_t>(row);
          args.targets[row] = -1 - (row - staying);
        }
        if (row == compact.rows - 1) {
          *compact.staying_size = staying;
          *compact.leaving_size = compact.rows - staying;
        }
      }
    });
  }
};

template <class Unit>
struct Move {
  static constexpr int kThreads = 128;
  using Args = Work;
  struct Shared {
    char unused;
  };
  template <class B>
  static TIDE_DEVICE void run(B& block, Shared&, const Args& args) {
    const TideCompactArgs& compact = args.compact;
    const int64_t index = args.targets[block.x];
    const char* source = static_cast<const char*>(compact.states) + block.x * compact.states_stride;
    char* target = index >= 0 ? static_cast<char*>(compact.staying) + index * compact.row_bytes
                              : static_cast<char*>(compact.leaving) + (-1 - index) * compact.row_bytes;
    block.phase([&](int thread) { copy_row<Unit>(target, source, compact.row_bytes, thread, kThreads); });
  }
};

struct NoRows {
  static constexpr int kThreads = 32;
  using Args = TideCompactArgs;
  struct Shared {
    char unused;
  };
  template <class B>
  static TIDE_DEVICE void run(B& block, Shared&, const Args& args) {
    block.phase([&](int thread) {
      if (thread == 0) *args.staying_size = *args.leaving_size = 0;
    });
  }
};

bool usable(const TideCompactArgs& args) {
  return args.rows >= 0 && args.rows <= INT32_MAX && args.row_bytes >= 0 && args.staying_size && args.leaving_size &&
         (args.rows == 0 || (args.exits && args.staying_rows && args.leaving_rows)) &&
         (args.rows == 0 || args.row_bytes == 0 || (args.states && args.staying && args.leaving));
}

}  // namespace
}  // namespace tide

extern "C" int64_t tide_compact_workspace(const TideCompactArgs* args) {
  return (tide::blocks_for(args->rows, tide::kTile) + args->rows) * int64_t{sizeof(int64_t)};
}

extern "C" cudaError_t tide_compact(const TideCompactArgs* args, void* workspace, int64_t workspace_bytes,
                                    cudaStream_t stream) {
  using namespace tide;
  if (args == nullptr || !usable(*args)) return cudaErrorInvalidValue;
  if (args->rows == 0) return launch<NoRows>(dim3(1), *args, stream);
  if (workspace == nullptr || workspace_bytes < tide_compact_workspace(args)) return cudaErrorInvalidValue;

  const int64_t tiles = blocks_for(args->rows, kTile);
  int64_t* counts = static_cast<int64_t*>(workspace);
  const Work work{*args, counts, counts + tiles};
  const dim3 tile_grid(static_cast<unsigned>(tiles)), row_grid(static_cast<unsigned>(args->rows));
  cudaError_t status = tiles > 1 ? launch<Count>(tile_grid, work, stream) : cudaSuccess;
  if (status == cudaSuccess) status = launch<Rank>(tile_grid, work, stream);
  if (status != cudaSuccess || args->row_bytes == 0) return status;
  return with_copy_unit({args->states, args->staying, args->leaving}, {args->states_stride, args->row_bytes},
                        [&](auto unit) { return launch<Move<decltype(unit)>>(row_grid, work, stream); });
}

// Without a lens one launch, a block per row. With one, the lens's two matmuls come first, for all rows (only the
// device knows which of them exit): rows times lens_down, slices added and rounded to the states' type as in a graph,
// times lens_up.
#include "tide_exit_scatter/kernel.cuh"

#include "common/norm.cuh"
#include "common/project.cuh"

namespace tide {
namespace {

struct InnerArgs {
  const float* partial;
  int64_t slices, size;
  void* inner;
};

// The lens's inner states: slices added.
template <class T>
struct Inner {
  static constexpr int kThreads = 256;
  using Args = InnerArgs;
  struct Shared {
    char unused;
  };
  template <class B>
  static TIDE_DEVICE void run(B& block, Shared&, const Args& args) {
    block.phase([&](int thread) {
      const int64_t i = block.x * kThreads + thread;
      if (i < args.size)
        static_cast<T*>(args.inner)[i] = from_float<T>(slice_sum(args.partial + i, args.slices, args.size));
    });
  }
};

struct ScatterArgs {
  TideExitScatterArgs exit;
  const float* lens;  // [slices, rows, hidden], what the lens adds, without its bias; null: no lens
  int64_t slices;
};

template <class T, class W>
struct Scatter {
  static constexpr int kThreads = 256;
  using Args = ScatterArgs;
  struct Shared {
    float sums[kThreads];
    bool leaves;
  };

  template <class B>
  static TIDE_DEVICE void run(B& block, Shared& shared, const Args& args) {
    const TideExitScatterArgs& exit = args.exit;
    const TideNormArgs& norm = exit.norm;
    const int64_t row = block.x;
    const int64_t destination = exit.destination == nullptr ? row : exit.destination[row];
    block.phase([&](int thread) {
      if (thread == 0)
        shared.leaves = exit.exits[row] != 0 && destination >= 0 && destination < exit.output_rows &&
                        exit.exit_layers[destination] == 0;
    });
    if (!shared.leaves) return;

    const T* states = static_cast<const T*>(exit.states) + row * exit.states_stride;
    const auto state = [&](int64_t i) {
      const float raw = to_float(states[i]);
      if (args.lens == nullptr) return raw;
      const float added = slice_sum(args.lens + row * exit.hidden + i, args.slices, exit.rows * exit.hidden);
      return raw + added + to_float(static_cast<const W*>(exit.lens_bias)[i]);
    };
    const auto sum = [&](int thread, auto of) {
      float total = 0.0f;
      for (int64_t i = thread; i < exit.hidden; i += kThreads) total += of(state(i));
      return total;
    };
    Moments moments{0.0f, 1.0f};
    if (norm.kind != TIDE_NORM_NONE)
      moments = row_moments<kThreads>(block, shared.sums, norm.kind, static_cast<float>(exit.hidden), norm.epsilon, sum);
    block.phase([&](int thread) {
      T* output = static_cast<T*>(exit.output) + destination * exit.output_stride;
      for (int64_t i = thread; i < exit.hidden; i += kThreads) {
        const float value = state(i);
        output[i] = from_float<T>(norm.kind == TIDE_NORM_NONE
                                      ? value
                                      : normalized<W>(value, moments, norm.scale, norm.scale_offset, norm.shift, i));
      }
      if (thread == 0) {
        exit.exit_layers[destination] = exit.layer;
        atomic_add(exit.counts + exit.checkpoint, 1);
      }
    });
  }
};

template <class T>
cudaError_t launch_inner(const InnerArgs& args, cudaStream_t stream) {
  return launch<Inner<T>>(dim3(static_cast<unsigned>(blocks_for(args.size, Inner<T>::kThreads))), args, stream);
}

template <class T>
cudaError_t launch_scatter(const ScatterArgs& args, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(args.exit.rows));
  if (args.exit.weights_type == args.exit.states_type) return launch<Scatter<T, T>>(grid, args, stream);
  return launch<Scatter<T, float>>(grid, args, stream);
}

int64_t padded(int64_t bytes) { return blocks_for(bytes, 256) * 256; }

// Bytes of the workspace for the slices of either matmul; the inner states follow.
int64_t matmul_bytes(const TideExitScatterArgs& args) {
  const int64_t down = partial_size(args.rows, args.hidden, args.lens_rank);
  const int64_t up = partial_size(args.rows, args.lens_rank, args.hidden);
  return padded((down > up ? down : up) * int64_t{sizeof(float)});
}

bool usable(const TideExitScatterArgs& args) {
  const bool sizes = args.rows >= 0 && args.rows <= INT32_MAX && args.hidden > 0 && args.lens_rank >= 0 &&
                     args.output_rows >= 0 && args.layer >= 1 && args.checkpoint >= 0;
  const bool types = known_type(args.states_type) &&
                     (args.weights_type == args.states_type || args.weights_type == TIDE_FLOAT32);
  return sizes && types && usable_norm(args.norm);
}

bool complete(const TideExitScatterArgs& args) {
  return args.states && args.exits && args.output && args.exit_layers && args.counts &&
         (args.lens_rank == 0 || (args.lens_down && args.lens_up && args.lens_bias));
}

Projection matmul(const TideExitScatterArgs& args, const void* x, int64_t depth, int64_t x_stride, const void* weights,
                   int64_t columns, float* partial) {
  Projection projection{};
  projection.x = x;
  projection.x_type = args.states_type;
  projection.rows = args.rows;
  projection.depth = depth;
  projection.x_stride = x_stride;
  projection.weights_type = args.weights_type;
  projection.weights[0] = {weights, columns, false};
  projection.partial = partial;
  return projection;
}

// Starts the lens's two matmuls and sets the location of their result in `scatter`.
cudaError_t start_lens(const TideExitScatterArgs& args, void* workspace, ScatterArgs& scatter, cudaStream_t stream) {
  float* partial = static_cast<float*>(workspace);
  void* inner = static_cast<char*>(workspace) + matmul_bytes(args);
  const Projection down =
      matmul(args, args.states, args.hidden, args.states_stride, args.lens_down, args.lens_rank, partial);
  const InnerArgs sums{partial, slices(args.rows, args.hidden), args.rows * args.lens_rank, inner};
  const Projection up = matmul(args, inner, args.lens_rank, args.lens_rank, args.lens_up, args.hidden, partial);
  scatter.lens = partial;
  scatter.slices = slices(args.rows, args.lens_rank);

  cudaError_t status = project(down, stream);
  if (status != cudaSuccess) return status;
  if (args.states_type == TIDE_FLOAT32) status = launch_inner<float>(sums, stream);
  if (args.states_type == TIDE_FLOAT16) status = launch_inner<__half>(sums, stream);
  if (args.states_type == TIDE_BFLOAT16) status = launch_inner<__nv_bfloat16>(sums, stream);
  if (status != cudaSuccess) return status;
  return project(up, stream);
}

}  // namespace
}  // namespace tide

extern "C" int64_t tide_exit_scatter_workspace(const TideExitScatterArgs* args) {
  if (args->lens_rank == 0) return 0;
  return tide::matmul_bytes(*args) + args->rows * args->lens_rank * tide::size_of(args->states_type);
}

extern "C" cudaError_t tide_exit_scatter(const TideExitScatterArgs* args, void* workspace, int64_t workspace_bytes,
                                         cudaStream_t stream) {
  using namespace tide;
  if (args == nullptr || !usable(*args)) return cudaErrorInvalidValue;
  if (args->rows == 0) return cudaSuccess;
  if (!complete(*args)) return cudaErrorInvalidValue;
  if (workspace_bytes < tide_exit_scatter_workspace(args) || (args->lens_rank > 0 && workspace == nullptr))
    return cudaErrorInvalidValue;

  ScatterArgs scatter{*args, nullptr, 0};
  const cudaError_t status = args->lens_rank > 0 ? start_lens(*args, workspace, scatter, stream) : cudaSuccess;
  if (status != cudaSuccess) return status;
  if (args->states_type == TIDE_FLOAT32) return launch_scatter<float>(scatter, stream);
  if (args->states_type == TIDE_FLOAT16) return launch_scatter<__half>(scatter, stream);
  return launch_scatter<__nv_bfloat16>(scatter, stream);
}

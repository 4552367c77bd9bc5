#include "common/project.cuh"

#include "common/norm.cuh"

namespace tide {
namespace {

template <class Tile>
struct Project {
  static constexpr int kThreads = Tile::kThreads;
  using Args = Projection;
  using Shared = typename Tile::Shared;
  using X = typename Tile::X;
  using W = typename Tile::W;
  static constexpr int kXAcross = Tile::kStep / Pack<X>::kCount, kXPacks = Tile::kRows * kXAcross;
  static constexpr int kWAcross = Tile::kColumns / Pack<W>::kCount, kWPacks = Tile::kStep * kWAcross;
  static constexpr int kXEach = (kXPacks + kThreads - 1) / kThreads, kWEach = (kWPacks + kThreads - 1) / kThreads;
  static_assert(kChunk % Tile::kStep == 0, "a chunk is a whole number of steps");

  // A thread's prefetch of the next step while the block computes with this one.
  struct Fetched {
    Pack<X> x[kXEach];
    Pack<W> w[kWEach];
  };

  struct TilePosition {
    int64_t row, column, columns;  // of the tile, in x and in its matrix
    const Weights* weights;
    int64_t partial_column, partial_columns;
  };

  static TIDE_DEVICE TilePosition position_of(int64_t x, int64_t y, const Args& args) {
    const int64_t first_tiles = blocks_for(args.weights[0].columns, Tile::kColumns);
    const bool second = y >= first_tiles;
    const int64_t column = (second ? y - first_tiles : y) * Tile::kColumns;
    const Weights* weights = &args.weights[second];
    return {x * Tile::kRows,
            column,
            weights->columns,
            weights,
            column + (second ? args.weights[0].columns : 0),
            args.weights[0].columns + args.weights[1].columns};
  }

  static TIDE_DEVICE void fetch(Fetched& fetched, int thread, int64_t k, const TilePosition& at, const Args& args) {
    TIDE_UNROLL
    for (int i = 0; i < kXEach; ++i) {
      const int number = thread + i * kThreads;
      const int64_t row = at.row + number / kXAcross, from = k + number % kXAcross * Pack<X>::kCount;
      if (number < kXPacks && row < args.rows && from < args.depth)
        load(fetched.x[i], static_cast<const X*>(args.x) + row * args.x_stride + from, args.depth - from, args.x_packs);
      else
        clear(fetched.x[i]);
    }
    TIDE_UNROLL
    for (int i = 0; i < kWEach; ++i) {
      const int number = thread + i * kThreads;
      const int64_t row = k + number / kWAcross, column = at.column + number % kWAcross * Pack<W>::kCount;
      if (number < kWPacks && row < args.depth && column < at.columns)
        load(fetched.w[i], static_cast<const W*>(at.weights->data) + row * at.columns + column, at.columns - column,
             at.weights->packs);
      else
        clear(fetched.w[i]);
    }
  }

  static TIDE_DEVICE void put(Shared& shared, const Fetched& fetched, int thread, int64_t k, const TilePosition& at,
                              const Args& args) {
    TIDE_UNROLL
    for (int i = 0; i < kXEach; ++i) {
      const int number = thread + i * kThreads;
      if (number >= kXPacks) break;
      const int row = number / kXAcross, step = number % kXAcross * Pack<X>::kCount;
      if (args.moments == nullptr || at.row + row >= args.rows) {
        Tile::put_x(shared, row, step, fetched.x[i]);
        continue;
      }
      const Moments moments = args.moments[at.row + row];
      TIDE_UNROLL
      for (int j = 0; j < Pack<X>::kCount; ++j) {
        const int64_t position = k + step + j;
        const float value = to_float(fetched.x[i].item[j]);
        Tile::put_x(shared, row, step + j,
                    position < args.depth
                        ? normalized<W>(value, moments, args.scale, args.scale_offset, args.shift, position)
                        : 0.0f);
      }
    }
    TIDE_UNROLL
    for (int i = 0; i < kWEach; ++i) {
      const int number = thread + i * kThreads;
      if (number < kWPacks) Tile::put_w(shared, number / kWAcross, number % kWAcross * Pack<W>::kCount, fetched.w[i]);
    }
  }

  template <class B>
  static TIDE_DEVICE void run(B& block, Shared& shared, const Args& args) {
#if defined(__CUDA_ARCH__)
    if constexpr (Tile::kFirstArch > __CUDA_ARCH__ || __CUDA_ARCH__ > Tile::kLastArch)
      __trap();  // `project` launches no such tile, and compiling it would only take time
    else
#endif
      compute(block, shared, args);
  }

  template <class B>
  static TIDE_DEVICE void compute(B& block, Shared& shared, const Args& args) {
    using Sum = typename Tile::Sum;
    typename B::template PerThread<Fetched> fetched;
    typename B::template PerThread<Sum> total, sum;
    const TilePosition at = position_of(block.x, block.y, args);
    const int64_t begin = args.split ? block.z * kChunk : 0;
    const int64_t end = args.split && begin + kChunk < args.depth ? begin + kChunk : args.depth;

    block.phase([&](int thread) {
      Tile::clear(total[thread], thread);
      Tile::clear(sum[thread], thread);
      fetch(fetched[thread], thread, begin, at, args);
    });
    for (int64_t k = begin; k < end; k += Tile::kStep) {
      block.phase([&](int thread) { put(shared, fetched[thread], thread, k, at, args); });
      block.phase([&](int thread) {
        const int64_t next = k + Tile::kStep;
        if (next < end) fetch(fetched[thread], thread, next, at, args);
        Tile::multiply(shared, sum[thread], thread);
        if (next % kChunk == 0 || next >= end) {
          Tile::add(total[thread], sum[thread], thread);
          Tile::clear(sum[thread], thread);
        }
      });
    }
    block.phase([&](int thread) { Tile::put_out(shared, total[thread], thread); });
    block.phase([&](int thread) {
      for (int i = thread; i < Tile::kRows * Tile::kColumns; i += kThreads) {
        const int row = i / Tile::kColumns, column = i % Tile::kColumns;
        if (at.row + row < args.rows && at.column + column < at.columns) {
          const int64_t slice = args.split ? block.z : 0;
          args.partial[(slice * args.rows + at.row + row) * at.partial_columns + at.partial_column + column] =
              shared.out[row * Tile::kOutStride + column];
        }
      }
    });
  }
};

template <class Tile>
cudaError_t launch_tile(const Projection& args, cudaStream_t stream) {
  const int64_t columns =
      blocks_for(args.weights[0].columns, Tile::kColumns) + blocks_for(args.weights[1].columns, Tile::kColumns);
  const int64_t depth = args.split ? blocks_for(args.depth, kChunk) : 1;
  if (columns > 65535 || depth > 65535) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(blocks_for(args.rows, Tile::kRows)), static_cast<unsigned>(columns),
                  static_cast<unsigned>(depth));
  return launch<Project<Tile>>(grid, args, stream);
}

// For few rows, and for more.
template <class T>
using SmallTensorTile = TensorTile<T, 16, 32, 256, 1, 1, 128>;
template <class T>
using LargeTensorTile = TensorTile<T, 64, 128, 64, 2, 2, 256>;
template <class X, class W>
using SmallPlainTile = PlainTile<X, W, 4, 32, 256, 1, 1>;
template <class X, class W>
using LargePlainTile = PlainTile<X, W, 64, 64, 32, 4, 4>;

template <class T>
cudaError_t launch_tensor(const Projection& args, cudaStream_t stream) {
  return args.rows <= 32 ? launch_tile<SmallTensorTile<T>>(args, stream) : launch_tile<LargeTensorTile<T>>(args, stream);
}

template <class X, class W>
cudaError_t launch_plain(const Projection& args, cudaStream_t stream) {
  return args.rows <= 16 ? launch_tile<SmallPlainTile<X, W>>(args, stream)
                         : launch_tile<LargePlainTile<X, W>>(args, stream);
}

// The architecture that the kernels on this device were compiled for, as __CUDA_ARCH__, which decides their code. It
// can be older than the device's: then the driver has compiled an older architecture's PTX.
cudaError_t compiled_arch(int& arch) {
#if defined(__CUDACC__)
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, entry<Project<SmallTensorTile<__half>>>);
  arch = attributes.ptxVersion * 10;
  return status;
#else
  arch = emulation().compute_capability * 100;
  return cudaSuccess;
#endif
}

struct MomentsArgs {
  const void* x;
  int64_t width, stride;
  int32_t kind;
  float epsilon;
  Moments* moments;
};

// One block per row.
template <class T>
struct RowMoments {
  static constexpr int kThreads = 256;
  using Args = MomentsArgs;
  struct Shared {
    float sums[kThreads];
  };
  template <class B>
  static TIDE_DEVICE void run(B& block, Shared& shared, const Args& args) {
    const T* row = static_cast<const T*>(args.x) + block.x * args.stride;
    const bool packs = reinterpret_cast<uintptr_t>(row) % 16 == 0;
    const auto sum = [&](int thread, auto of) {
      float total = 0.0f;
      for (int64_t i = int64_t{thread} * Pack<T>::kCount; i < args.width; i += kThreads * Pack<T>::kCount) {
        Pack<T> pack;
        load(pack, row + i, args.width - i, packs);
        TIDE_UNROLL
        for (int j = 0; j < Pack<T>::kCount; ++j)
          if (i + j < args.width) total += of(to_float(pack.item[j]));
      }
      return total;
    };
    const auto width = static_cast<float>(args.width);
    const Moments moments = row_moments<kThreads>(block, shared.sums, args.kind, width, args.epsilon, sum);
    block.phase([&](int thread) {
      if (thread == 0) args.moments[block.x] = moments;
    });
  }
};

}  // namespace

cudaError_t project(Projection args, cudaStream_t stream) {
  args.x_packs = allows_packs(args.x, args.rows == 1 ? 0 : args.x_stride, size_of(args.x_type));
  for (Weights& weights : args.weights)
    weights.packs = allows_packs(weights.data, weights.columns, size_of(args.weights_type));
  args.split = args.rows <= kSplitRows;
  if (args.weights_type == args.x_type) {
    if (args.x_type == TIDE_FLOAT32) return launch_plain<float, float>(args, stream);
    if (args.x_type == TIDE_FLOAT16) return launch_tensor<__half>(args, stream);
    int arch = 0;
    const cudaError_t status = compiled_arch(arch);
    if (status != cudaSuccess) return status;
    return arch >= 800 ? launch_tensor<__nv_bfloat16>(args, stream)
                       : launch_plain<__nv_bfloat16, __nv_bfloat16>(args, stream);
  }
  if (args.weights_type == TIDE_FLOAT32) {
    if (args.x_type == TIDE_FLOAT16) return launch_plain<__half, float>(args, stream);
    if (args.x_type == TIDE_BFLOAT16) return launch_plain<__nv_bfloat16, float>(args, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t row_moments(const void* x, int32_t type, int64_t rows, int64_t width, int64_t stride, int32_t kind,
                        float epsilon, Moments* moments, cudaStream_t stream) {
  const MomentsArgs args{x, width, stride, kind, epsilon, moments};
  const dim3 grid(static_cast<unsigned>(rows));
  if (type == TIDE_FLOAT32) return launch<RowMoments<float>>(grid, args, stream);
  if (type == TIDE_FLOAT16) return launch<RowMoments<__half>>(grid, args, stream);
  if (type == TIDE_BFLOAT16) return launch<RowMoments<__nv_bfloat16>>(grid, args, stream);
  return cudaErrorInvalidValue;
}

}  // namespace tide

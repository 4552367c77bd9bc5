// A thread block as a sequence of phases, so that one kernel body runs on a GPU and, compiled by a C++ compiler, on a CPU.
//
// A kernel is a struct `K` with `kThreads`, `Args`, `Shared` (its shared memory) and
//     template <class B> static TIDE_DEVICE void run(B& block, Shared& shared, const Args& args);
// whose body calls `block.phase([&](int thread) {...})`: the lambda runs once per thread, and a barrier ends the phase.
// A thread's values that outlive a phase are in `B::PerThread<T>`: registers on a GPU, an array on a CPU.
//
// The emulation is how kernels are tested where there is no GPU: it runs the threads of a phase, and the blocks of a
// grid, in an order that a seed shuffles, with shared memory and registers filled with NaN beforehand, under an address
// sanitizer if the build asks for one. Two threads of one phase that touch the same memory give results that change
// with the seed; memory read before it is written gives NaN.
#pragma once

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#else
#include <cuda_runtime_api.h>
#endif

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define TIDE_DEVICE __device__ __forceinline__
#define TIDE_BOTH __host__ __device__ __forceinline__
#define TIDE_UNROLL _Pragma("unroll")
#define TIDE_UNROLL_BY_4 _Pragma("unroll 4")
#define TIDE_UNROLL_BY_8 _Pragma("unroll 8")
#else
#include <memory>
#include <numeric>
#include <utility>
#include <vector>
#define TIDE_DEVICE inline
#define TIDE_BOTH inline
#define TIDE_UNROLL
#define TIDE_UNROLL_BY_4
#define TIDE_UNROLL_BY_8
#endif

namespace tide {

#if defined(__CUDACC__)

template <int kThreads>
class Block {
 public:
  template <class T>
  struct PerThread {
    T value;
    TIDE_DEVICE T& operator[](int) { return value; }
  };

  int64_t x = blockIdx.x, y = blockIdx.y, z = blockIdx.z;

  template <class Phase>
  TIDE_DEVICE void phase(Phase run) {
    run(static_cast<int>(threadIdx.x));
    __syncthreads();
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads) entry(const __grid_constant__ typename Kernel::Args args) {
  __shared__ typename Kernel::Shared shared;
  Block<Kernel::kThreads> block;
  Kernel::run(block, shared, args);
}

template <class Kernel>
cudaError_t launch(dim3 grid, const typename Kernel::Args& args, cudaStream_t stream) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(Kernel::kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, entry<Kernel>, args);  // this launch's error, not one that was there before
}

TIDE_DEVICE void atomic_add(int64_t* counter, int64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(value));
}

#else

struct Emulation {
  uint64_t order = 0;  // of threads and blocks: 0 is ascending, anything else a shuffle
  int compute_capability = 8;  // major
};

inline Emulation& emulation() {
  static Emulation settings;
  return settings;
}

// Calls run(0), run(1), ... run(count - 1) in the emulation's order.
template <class Run>
void in_emulated_order(int64_t count, uint64_t salt, Run run) {
  if (emulation().order == 0) {
    for (int64_t i = 0; i < count; ++i) run(i);
    return;
  }
  std::vector<int64_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), int64_t{0});
  uint64_t state = emulation().order * 0x9E3779B97F4A7C15ull + salt;
  for (int64_t i = count; i > 1; --i) {  // Fisher-Yates on a linear congruential generator
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    std::swap(order[static_cast<size_t>(i - 1)], order[static_cast<size_t>((state >> 33) % static_cast<uint64_t>(i))]);
  }
  for (int64_t i : order) run(i);
}

template <int kThreads>
class Block {
 public:
  template <class T>
  class PerThread {
   public:
    PerThread() : values_(new T[kThreads]) { std::memset(static_cast<void*>(values_.get()), 0xFF, sizeof(T) * kThreads); }
    T& operator[](int thread) { return values_[static_cast<size_t>(thread)]; }

   private:
    std::unique_ptr<T[]> values_;
  };

  int64_t x = 0, y = 0, z = 0;

  template <class Phase>
  void phase(Phase run) {
    in_emulated_order(kThreads, ++phases_, [&](int64_t thread) { run(static_cast<int>(thread)); });
  }

 private:
  uint64_t phases_ = 0;
};

template <class Kernel>
cudaError_t launch(dim3 grid, const typename Kernel::Args& args, cudaStream_t) {
  const int64_t blocks = int64_t{grid.x} * grid.y * grid.z;
  std::unique_ptr<typename Kernel::Shared> shared(new typename Kernel::Shared);
  in_emulated_order(blocks, 0, [&](int64_t number) {
    std::memset(static_cast<void*>(shared.get()), 0xFF, sizeof(*shared));
    Block<Kernel::kThreads> block;
    block.x = number % grid.x;
    block.y = number / grid.x % grid.y;
    block.z = number / grid.x / grid.y;
    Kernel::run(block, *shared, args);
  });
  return cudaSuccess;
}

inline void atomic_add(int64_t* counter, int64_t value) { *counter += value; }

#endif

// Blocks needed for `count` items, `each` to a block.
TIDE_BOTH int64_t blocks_for(int64_t count, int64_t each) { return (count + each - 1) / each; }

// Folds one value per thread into one, always in the same order: the result depends on kThreads alone. `slots` is
// shared memory; afterwards every thread may read `slots[0]`. kThreads is a power of two.
template <int kThreads, class B, class T, class Merge>
TIDE_DEVICE void fold(B& block, T* slots, Merge merge) {
  static_assert((kThreads & (kThreads - 1)) == 0, "a power of two");
  for (int half = kThreads / 2; half > 0; half /= 2) {
    block.phase([&](int thread) {
      if (thread < half) slots[thread] = merge(slots[thread], slots[thread + half]);
    });
  }
}

}  // namespace tide

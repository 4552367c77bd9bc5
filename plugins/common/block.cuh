// Blocks of threads, their phases, and counters by which blocks of a launch wait for each other's results.
//
// A kernel's code calls `block.phase([&](int thread) {...})`, which runs once per thread. A barrier of the block ends a phase.
// A block that waits for others must have taken its number by `number_of` and wait for blocks of smaller numbers alone:
// those have started, so that no launch stands still, however few of its blocks a GPU takes at once.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/device.cuh"
#include "common/types.h"

#define TIDE_DEVICE __device__ __forceinline__
#define TIDE_BOTH __host__ __device__ __forceinline__
#define TIDE_UNROLL _Pragma("unroll")

namespace tide {

constexpr int kThreads = TIDE_BLOCK_THREADS;

class Block {
 public:
  float* const shared;

  TIDE_DEVICE explicit Block(float* memory) : shared(memory) {}

  template <class Phase>
  TIDE_DEVICE void phase(Phase run) {
    run(static_cast<int>(threadIdx.x));
    __syncthreads();
  }

  // Without a barrier, where the end of the kernel follows.
  template <class Phase>
  TIDE_DEVICE void last_phase(Phase run) {
    run(static_cast<int>(threadIdx.x));
  }
};

// The block's number in the order in which a launch's blocks start. `counter` is 0 before the launch and after it; `said`
// is a place in shared memory.
TIDE_DEVICE unsigned number_of(Block& block, unsigned* counter, unsigned* said) {
  block.phase([&](int thread) {
    if (thread == 0) *said = atomicInc(counter, gridDim.x - 1);
  });
  return *said;
}

// Tells others that what this block has written by now is there; returns how many had done so before. Others read it after
// `await`, or if they come later. `said` is a place in shared memory of its own.
TIDE_DEVICE unsigned publish(Block& block, unsigned* counter, unsigned* said) {
  block.phase([&](int thread) {
    if (thread != 0) return;
    __threadfence();
    *said = atomicAdd(counter, 1u);
    __threadfence();
  });
  return *said;
}

// Returns when `count` blocks have published.
TIDE_DEVICE void await(Block& block, const unsigned* counter, unsigned count) {
  block.phase([&](int thread) {
    if (thread != 0) return;
    while (seen(counter) < count) continue;
    __threadfence();
  });
}

// Folds kCount values in shared memory into the first kKept, a value i with those at i + n * kKept, always in the same
// order. Afterwards every thread may read them. Both are powers of two. A thread folds up to 16 values at a time: a
// barrier takes longer than that.
template <int kCount, int kKept, class T, class Merge>
TIDE_DEVICE void fold(Block& block, T* values, Merge merge) {
  static_assert((kCount & (kCount - 1)) == 0 && (kKept & (kKept - 1)) == 0 && kCount <= kThreads, "powers of two");
  constexpr int kLeft = kCount / 16 > kKept ? kCount / 16 : kKept;
  block.phase([&](int thread) {
    if (thread >= kLeft) return;
    T folded = values[thread];
    TIDE_UNROLL
    for (int i = kLeft; i < kCount; i += kLeft) folded = merge(folded, values[thread + i]);
    values[thread] = folded;
  });
  if constexpr (kLeft > kKept) fold<kLeft, kKept>(block, values, merge);
}

}  // namespace tide

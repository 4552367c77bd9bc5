// Teams of thread blocks, as stages and phases.
//
// A team works on one group of slots in one launch: a cluster, whose blocks read each other's shared memory, from compute
// capability 9.0 on; before it, some blocks of a cooperative launch, which exchange values in global memory.
//
// A kernel is a struct `K` with `Args` and
//     static Sizes sizes(const Args& args, int blocks);
//     static TIDE_DEVICE void run(Team& team, const Args& args);
// whose body calls `team.stage([&](Block& block) {...})`, which runs once per block, and in it `block.phase([&](int
// thread) {...})`, which runs once per thread. A barrier of the block ends a phase, and one of the team a stage. A block
// keeps values in `block.shared`; other blocks read those in its region, `block.region(rank)`.
#pragma once

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/device.cuh"

#define TIDE_DEVICE __device__ __forceinline__
#define TIDE_BOTH __host__ __device__ __forceinline__
#define TIDE_UNROLL _Pragma("unroll")
#define TIDE_UNROLL_BY_16 _Pragma("unroll 16")

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define TIDE_CLUSTERS 1
#else
#define TIDE_CLUSTERS 0
#endif

namespace tide {

constexpr int kThreads = 512;    // of every block
constexpr int kMaxBlocks = 16;   // of a team
constexpr int kLoneTeams = 4;    // teams of a launch without clusters, at most: all their blocks must be resident

// What a kernel needs for its arguments and this many blocks to a team, in floats; multiples of 4.
struct Sizes {
  int64_t region;  // that a block lets the others of its team read
  int64_t shared;  // that a block keeps for itself
};

struct Layout {
  int blocks;         // of a team
  int64_t region;     // as in Sizes
  float* exchange;    // the regions of all blocks, where there are no clusters
};

// Blocks needed for `count` items, `each` to a block.
TIDE_BOTH int64_t blocks_for(int64_t count, int64_t each) { return (count + each - 1) / each; }

// Bytes of global memory that a launch for `groups` needs where there are no clusters.
inline int64_t exchange_bytes(int64_t groups, Sizes sizes) {
  return (groups < kLoneTeams ? groups : kLoneTeams) * kMaxBlocks * sizes.region * int64_t{sizeof(float)};
}

class Block {
 public:
  int rank, blocks;  // of how many in the team
  float* shared;

  TIDE_DEVICE Block(const Layout& layout, float* memory)
      : rank(static_cast<int>(blockIdx.x) % layout.blocks), blocks(layout.blocks), shared(memory) {
    if (TIDE_CLUSTERS) {
      own_ = memory;
      shared += layout.region;
    } else {
      own_ = layout.exchange + (blockIdx.x - rank) * layout.region;
      size_ = layout.region;
    }
  }

  // What block `of` of the team lets the others read.
  TIDE_DEVICE float* region(int of) const {
#if TIDE_CLUSTERS
    return cooperative_groups::this_cluster().map_shared_rank(own_, of);
#else
    return own_ + of * size_;
#endif
  }

  template <class Phase>
  TIDE_DEVICE void phase(Phase run) {
    run(static_cast<int>(threadIdx.x));
    __syncthreads();
  }

  // Without a barrier, where the end of the stage or of the kernel follows.
  template <class Phase>
  TIDE_DEVICE void last_phase(Phase run) {
    run(static_cast<int>(threadIdx.x));
  }

 private:
  float* own_;
  int64_t size_ = 0;
};

class Team {
 public:
  int64_t number, count;  // of how many in the launch

  TIDE_DEVICE Team(const Layout& layout, float* memory)
      : number(blockIdx.x / layout.blocks), count(gridDim.x / layout.blocks), block_(layout, memory) {}

  // Until it returns the kernel before this one may still run, and nothing that it writes may be touched.
  TIDE_DEVICE void wait_for_inputs() {
#if TIDE_CLUSTERS
    cudaGridDependencySynchronize();
#endif
  }

  // Without a barrier: nothing that it writes may be read by other blocks, nor what they read be written.
  template <class Stage>
  TIDE_DEVICE void last_stage(Stage run) {
    run(block_);
  }

  template <class Stage>
  TIDE_DEVICE void stage(Stage run) {
    run(block_);
#if TIDE_CLUSTERS
    cooperative_groups::this_cluster().sync();
#else
    cooperative_groups::this_grid().sync();
#endif
  }

 private:
  Block block_;
};

template <class Kernel>
__global__ void __launch_bounds__(kThreads, 1)
    entry(const __grid_constant__ Layout layout, const __grid_constant__ typename Kernel::Args args) {
  Team team(layout, shared_memory());
  Kernel::run(team, args);
}

// Sets the shared memory of a block.
template <class Kernel>
cudaError_t reserve_shared(const typename Kernel::Args& args, const Layout& layout, bool clusters,
                           cudaLaunchConfig_t& config) {
  const int64_t bytes =
      (Kernel::sizes(args, layout.blocks).shared + (clusters ? layout.region : 0)) * int64_t{sizeof(float)};
  if (bytes > INT32_MAX) return cudaErrorInvalidValue;
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  if (bytes <= 48 * 1024) return cudaSuccess;
  return cudaFuncSetAttribute(entry<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

// Starts a team per group with clusters, else as many teams as can be resident, which take the groups in turn.
template <class Kernel>
cudaError_t launch(const typename Kernel::Args& args, int64_t groups, void* exchange, cudaStream_t stream) {
  // What the code on this device was compiled for: it can be older than the device, if the driver compiled its PTX.
  cudaFuncAttributes compiled{};
  cudaError_t status = cudaFuncGetAttributes(&compiled, entry<Kernel>);
  if (status != cudaSuccess) return status;
  const bool clusters = compiled.ptxVersion >= 90;
  Layout layout{kMaxBlocks, Kernel::sizes(args, kMaxBlocks).region, static_cast<float*>(exchange)};
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kMaxBlocks);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = attributes;
  status = reserve_shared<Kernel>(args, layout, clusters, config);
  if (status != cudaSuccess) return status;
  int64_t teams = groups;
  if (clusters) {
    status = cudaFuncSetAttribute(entry<Kernel>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (status != cudaSuccess) return status;
    int largest = 0;
    status = cudaOccupancyMaxPotentialClusterSize(&largest, entry<Kernel>, &config);
    if (status != cudaSuccess) return status;
    if (largest < kMaxBlocks) layout.blocks = kMaxBlocks / 2;  // a cluster may always have 8 blocks
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = static_cast<unsigned>(layout.blocks);
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.numAttrs = 2;
  } else {
    int device = 0, processors = 0;
    status = cudaGetDevice(&device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (status != cudaSuccess) return status;
    while (layout.blocks > processors) layout.blocks /= 2;
    const int64_t resident = processors / layout.blocks;
    teams = std::min({groups, resident, int64_t{kLoneTeams}});
    attributes[0].id = cudaLaunchAttributeCooperative;
    attributes[0].val.cooperative = 1;
    config.numAttrs = 1;
  }
  if (layout.blocks < kMaxBlocks) status = reserve_shared<Kernel>(args, layout, clusters, config);
  if (status != cudaSuccess) return status;
  config.gridDim = dim3(static_cast<unsigned>(teams * layout.blocks));
  return cudaLaunchKernelEx(&config, entry<Kernel>, layout, args);  // this launch's error, not one that was there before
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

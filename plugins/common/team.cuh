// Teams of thread blocks, as stages and phases, so that one kernel body runs on a GPU and, compiled by a C++ compiler, on
// a CPU.
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
//
// The emulation is how kernels are tested where there is no GPU: it runs the threads of a phase, the blocks of a stage and
// the teams in an order that a seed shuffles, with NaN in shared memory beforehand, under an address sanitizer if the
// build asks for one. Two threads of one phase, or two blocks of one stage, that touch the same memory give results that
// change with the seed; memory read before it is written gives NaN.
#pragma once

#if defined(__CUDACC__)
#include <cooperative_groups.h>
#include <cuda_runtime.h>
#else
#include <cuda_runtime_api.h>
#endif

#include <algorithm>
#include <cstdint>

#if defined(__CUDACC__)
#define TIDE_DEVICE __device__ __forceinline__
#define TIDE_BOTH __host__ __device__ __forceinline__
#define TIDE_UNROLL _Pragma("unroll")
#define TIDE_UNROLL_BY_16 _Pragma("unroll 16")
#else
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>
#define TIDE_DEVICE inline
#define TIDE_BOTH inline
#define TIDE_UNROLL
#define TIDE_UNROLL_BY_16
#endif

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

#if defined(__CUDACC__)

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

 private:
  float* own_;
  int64_t size_ = 0;
};

class Team {
 public:
  int64_t number, count;  // of how many in the launch

  TIDE_DEVICE Team(const Layout& layout, float* memory)
      : number(blockIdx.x / layout.blocks), count(gridDim.x / layout.blocks), block_(layout, memory) {}

  // Fetches the block's share of what no kernel before this one writes, weights, into the cache.
  TIDE_DEVICE void prefetch(const void* data, int64_t bytes) {
#if TIDE_CLUSTERS
    if (data == nullptr) return;
    const char* at = static_cast<const char*>(data) + (int64_t{block_.rank} * kThreads + threadIdx.x) * 128;
    for (const char* end = static_cast<const char*>(data) + bytes; at < end; at += int64_t{block_.blocks} * kThreads * 128)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
  }

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
  extern __shared__ __align__(16) float memory[];
  Team team(layout, memory);
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

#else

struct Emulation {
  uint64_t order = 0;  // of threads, blocks and teams: 0 is ascending, anything else a shuffle
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

class Block {
 public:
  int rank = 0, blocks = 0;
  float* shared = nullptr;
  std::vector<float*> regions;  // of all blocks of the team

  float* region(int of) const { return regions[static_cast<size_t>(of)]; }

  template <class Phase>
  void phase(Phase run) {
    in_emulated_order(kThreads, ++phases_, [&](int64_t thread) { run(static_cast<int>(thread)); });
  }

 private:
  uint64_t phases_ = 0;
};

class Team {
 public:
  int64_t number = 0, count = 0;

  Team(int64_t number_, int64_t count_, const Layout& layout, Sizes sizes) : number(number_), count(count_) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::vector<float*> regions;
    for (int rank = 0; rank < layout.blocks; ++rank) {
      memories_.emplace_back(static_cast<size_t>(sizes.shared), nan);
      regions_.emplace_back(static_cast<size_t>(sizes.region), nan);
      regions.push_back(layout.exchange == nullptr ? regions_.back().data()
                                                   : layout.exchange + (number * layout.blocks + rank) * layout.region);
    }
    for (int rank = 0; rank < layout.blocks; ++rank) {
      Block block;
      block.rank = rank;
      block.blocks = layout.blocks;
      block.shared = memories_[static_cast<size_t>(rank)].data();
      block.regions = regions;
      blocks_.push_back(block);
    }
  }

  void prefetch(const void*, int64_t) {}
  void wait_for_inputs() {}

  template <class Stage>
  void last_stage(Stage run) {
    stage(run);
  }

  template <class Stage>
  void stage(Stage run) {
    in_emulated_order(static_cast<int64_t>(blocks_.size()), ++stages_,
                      [&](int64_t rank) { run(blocks_[static_cast<size_t>(rank)]); });
  }

 private:
  std::vector<Block> blocks_;
  std::vector<std::vector<float>> memories_, regions_;
  uint64_t stages_ = 0;
};

// As on a GPU: 16 blocks to a cluster on compute capability 9 and 10, 8 on later ones, 16 without clusters.
template <class Kernel>
cudaError_t launch(const typename Kernel::Args& args, int64_t groups, void* exchange, cudaStream_t) {
  const int capability = emulation().compute_capability;
  const bool clusters = capability >= 9;
  const int blocks = capability > 10 ? kMaxBlocks / 2 : kMaxBlocks;
  const Sizes sizes = Kernel::sizes(args, blocks);
  const Layout layout{blocks, sizes.region, clusters ? nullptr : static_cast<float*>(exchange)};
  const int64_t teams = clusters ? groups : std::min(groups, int64_t{kLoneTeams});
  in_emulated_order(teams, 0, [&](int64_t number) {
    Team team(number, teams, layout, sizes);
    Kernel::run(team, args);
  });
  return cudaSuccess;
}

#endif

// Folds kCount values in shared memory into the first kKept, a value i with those at i + n * kKept, always in the same
// order. Afterwards every thread may read them. Both are powers of two.
template <int kCount, int kKept, class T, class Merge>
TIDE_DEVICE void fold(Block& block, T* values, Merge merge) {
  static_assert((kCount & (kCount - 1)) == 0 && (kKept & (kKept - 1)) == 0 && kCount <= kThreads, "powers of two");
  for (int half = kCount / 2; half >= kKept; half /= 2) {
    block.phase([&](int thread) {
      if (thread < half) values[thread] = merge(values[thread], values[thread + half]);
    });
  }
}

}  // namespace tide

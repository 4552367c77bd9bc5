// Kernels with one fault each, which the fibres must report: for test_kernel_barriers.py.
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include "common/device.cuh"

namespace {

constexpr unsigned kThreads = 32;

// Clusters of two blocks; `data` is global memory, a number for each thread of all blocks.
__global__ void faulty(int fault, float* data) {
  const auto cluster = cooperative_groups::this_cluster();
  const unsigned thread = threadIdx.x, rank = blockIdx.x % 2;
  float* own = tide::shared_memory();
  float* neighbour = cluster.map_shared_rank(own, static_cast<int>(1 - rank));
  float& mine = data[blockIdx.x * kThreads + thread];
  if (fault == 1) mine = 1;
  cudaGridDependencySynchronize();
  own[thread] = 1;
  if (fault == 2) mine = neighbour[thread];
  if (fault == 3) mine = own[thread ^ 1];
  if (fault == 4 && thread < 5) __syncthreads();
  if (fault == 5 && rank == 1) return;
  cluster.sync();
  mine = neighbour[thread] + own[thread ^ 1];
  if (fault == 6) neighbour[thread] = mine;
  if (fault == 7) mine = own[thread + kThreads];
  if (fault == 8) own[thread + 2 * kThreads] = 1;
  if (fault == 9) data[thread] = mine;
  if (fault == 10) cooperative_groups::this_grid().sync();
  if (fault != 11) cluster.sync();
  if (fault == 12) mine = neighbour[thread];
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int start(int fault, float* data, unsigned blocks) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {2, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  const cudaLaunchConfig_t config{dim3(blocks), dim3(kThreads), 2 * kThreads * sizeof(float), nullptr, attributes, 2};
  return cudaLaunchKernelEx(&config, faulty, fault, data);
}

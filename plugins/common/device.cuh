// What has no words in C++. On a CPU the tests have their own file in place of this one (tests/plugins/fibres/include).
#pragma once

namespace tide {

// The block's dynamic shared memory.
__device__ __forceinline__ float* shared_memory() {
  extern __shared__ __align__(16) float memory[];
  return memory;
}

}  // namespace tide

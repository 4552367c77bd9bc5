// What has no words in C++. On a CPU the tests have their own file in place of this one (tests/plugins/fibres/include).
#pragma once

namespace tide {

// The block's dynamic shared memory.
__device__ __forceinline__ float* shared_memory() {
  extern __shared__ __align__(16) float memory[];
  return memory;
}

// What a counter holds by now, which other blocks change.
__device__ __forceinline__ unsigned seen(const unsigned* counter) {
  return *static_cast<const volatile unsigned*>(counter);
}

}  // namespace tide

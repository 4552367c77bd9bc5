// Copies of rows whose element type does not matter, in the widest units that their addresses allow.
#pragma once

#include <initializer_list>

#include "common/block.cuh"

namespace tide {

// The share of `thread` in copying `bytes`, a multiple of sizeof(Unit), as both addresses are.
template <class Unit>
TIDE_DEVICE void copy_row(void* target, const void* source, int64_t bytes, int thread, int threads) {
  for (int64_t i = thread; i < bytes / int64_t{sizeof(Unit)}; i += threads)
    static_cast<Unit*>(target)[i] = static_cast<const Unit*>(source)[i];
}

// Calls run(Unit{}) with the widest unit that all addresses and all distances are multiples of.
template <class Run>
cudaError_t with_copy_unit(std::initializer_list<const void*> addresses, std::initializer_list<int64_t> distances,
                           Run run) {
  uint64_t bits = 0;
  for (const void* address : addresses) bits |= reinterpret_cast<uintptr_t>(address);
  for (int64_t distance : distances) bits |= static_cast<uint64_t>(distance);
  if (bits % 16 == 0) return run(uint4{});
  if (bits % 4 == 0) return run(uint32_t{});
  if (bits % 2 == 0) return run(uint16_t{});
  return run(uint8_t{});
}

}  // namespace tide

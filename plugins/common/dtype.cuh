// Element types: float32, float16, bfloat16 in memory, float32 in arithmetic.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/block.cuh"
#include "common/types.h"

namespace tide {

TIDE_BOTH float to_float(float x) { return x; }
TIDE_BOTH float to_float(__half x) { return __half2float(x); }
TIDE_BOTH float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
TIDE_BOTH T from_float(float x);
template <>
TIDE_BOTH float from_float<float>(float x) {
  return x;
}
template <>
TIDE_BOTH __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
TIDE_BOTH __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Four elements in one access.
template <class T>
struct alignas(4 * sizeof(T)) Four {
  T item[4];
};

// Whether rows of `width` elements, `stride` apart from `data` on, may be read in fours.
template <class T>
TIDE_BOTH bool allows_fours(const T* data, int64_t stride, int64_t width) {
  return reinterpret_cast<uintptr_t>(data) % sizeof(Four<T>) == 0 && stride % 4 == 0 && width % 4 == 0;
}

// The value as T holds it.
template <class T>
TIDE_BOTH float rounded(float x) {
  return to_float(from_float<T>(x));
}

}  // namespace tide

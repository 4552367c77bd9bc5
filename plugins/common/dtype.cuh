// Element types: float32, float16, bfloat16 in memory, float32 in arithmetic; 16-byte packs where memory allows.
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

// One element of an array whose type is known at run time; for the small arrays that are read once.
TIDE_BOTH float element(const void* array, int32_t type, int64_t index) {
  if (type == TIDE_FLOAT16) return to_float(static_cast<const __half*>(array)[index]);
  if (type == TIDE_BFLOAT16) return to_float(static_cast<const __nv_bfloat16*>(array)[index]);
  return static_cast<const float*>(array)[index];
}

TIDE_BOTH bool known_type(int32_t type) { return type >= TIDE_FLOAT32 && type <= TIDE_BFLOAT16; }

TIDE_BOTH int64_t size_of(int32_t type) { return type == TIDE_FLOAT32 ? 4 : 2; }

// 16 bytes of elements.
template <class T>
struct alignas(16) Pack {
  static constexpr int kCount = 16 / static_cast<int>(sizeof(T));
  T item[kCount];
};

template <class T>
TIDE_DEVICE void clear(Pack<T>& pack) {
  TIDE_UNROLL
  for (int i = 0; i < Pack<T>::kCount; ++i) pack.item[i] = from_float<T>(0.0f);
}

// Elements source[0 .. valid), the rest zero; in one access if `vector`: `source` is 16-byte aligned.
template <class T>
TIDE_DEVICE void load(Pack<T>& pack, const T* source, int64_t valid, bool vector) {
  constexpr int kCount = Pack<T>::kCount;
  if (vector && valid >= kCount) {
    const uint4 raw = *reinterpret_cast<const uint4*>(source);
    memcpy(&pack, &raw, sizeof(raw));
    return;
  }
  TIDE_UNROLL
  for (int i = 0; i < kCount; ++i) pack.item[i] = i < valid ? source[i] : from_float<T>(0.0f);
}

// Whether rows of `stride` elements starting at `data` may be read in packs.
inline bool allows_packs(const void* data, int64_t stride, int64_t element_size) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * element_size % 16 == 0;
}

}  // namespace tide

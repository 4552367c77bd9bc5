#include "bf16_matmul.h"

#include <cstring>
#include <type_traits>

namespace tide_ops {
namespace {

typedef float Quad __attribute__((vector_size(16), aligned(4)));
template <int value>
using Int = std::integral_constant<int, value>;

inline float widen(std::uint16_t weight) {
  std::uint32_t const bits = std::uint32_t{weight} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The sum of each of four vectors.
inline Quad sums_of(Quad a, Quad b, Quad c, Quad d) {
  Quad const ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
  Quad const cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

#if defined(__clang__)
#define TIDE_BEGIN_TARGET_(text) _Pragma(text)
#define TIDE_BEGIN_TARGET(set) \
  TIDE_BEGIN_TARGET_(TIDE_TEXT(clang attribute push(__attribute__((target(set))), apply_to = function)))
#define TIDE_END_TARGET _Pragma("clang attribute pop")
#else
#define TIDE_BEGIN_TARGET(set) _Pragma("GCC push_options") _Pragma(TIDE_TEXT(GCC target(set)))
#define TIDE_END_TARGET _Pragma("GCC pop_options")
#endif
#define TIDE_TEXT(...) #__VA_ARGS__

#if defined(__x86_64__)
TIDE_BEGIN_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
namespace avx512 {
#define TIDE_LANES 16
#define TIDE_COLUMNS 2
#include "bf16_matmul.inc"
#undef TIDE_LANES
#undef TIDE_COLUMNS
}  // namespace avx512
TIDE_END_TARGET
TIDE_BEGIN_TARGET("avx2,fma")
namespace avx2 {
#define TIDE_LANES 8
#define TIDE_COLUMNS 1
#include "bf16_matmul.inc"
#undef TIDE_LANES
#undef TIDE_COLUMNS
}  // namespace avx2
TIDE_END_TARGET
#endif

// What every CPU of this kind has: NEON on arm64, SSE2 on x86-64.
namespace baseline {
#define TIDE_LANES 4
#define TIDE_COLUMNS 1
#include "bf16_matmul.inc"
}  // namespace baseline

Bf16Kernel const kKernels[] = {
#if defined(__x86_64__)
    {"avx512",
     [] { return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"); },
     avx512::split_row, avx512::multiply},
    {"avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }, avx2::split_row,
     avx2::multiply},
#endif
    {"baseline", [] { return true; }, baseline::split_row, baseline::multiply},
};

Bf16Kernel const* first_of(char const* name) {
  for (Bf16Kernel const& kernel : kKernels) {
    if ((name == nullptr || std::strcmp(name, kernel.name) == 0) && kernel.supported()) return &kernel;
  }
  return nullptr;
}

}  // namespace

Bf16Kernel const* bf16_kernel(char const* name) {
  static Bf16Kernel const* const best = first_of(nullptr);
  return name == nullptr ? best : first_of(name);
}

}  // namespace tide_ops

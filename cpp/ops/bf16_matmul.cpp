#include "bf16_matmul.h"

#include <cstring>
#include <type_traits>

#include "targets.h"

namespace tide_ops {
namespace {

typedef float Quad __attribute__((vector_size(16), aligned(4)));
template <int value>
using Int = std::integral_constant<int, value>;
constexpr std::int64_t kLine = 32;     // weights in a line of the cache
constexpr std::int64_t kAhead = 2048;  // weights from those that are multiplied by to those that are prefetched

inline float widen(std::uint16_t weight) {
  std::uint32_t const bits = std::uint32_t{weight} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

#if defined(__x86_64__)
TIDE_BEGIN_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
namespace avx512 {
#define TIDE_LANES 16
#define TIDE_ROWS 5
#include "bf16_matmul.inc"
#undef TIDE_LANES
#undef TIDE_ROWS
}  // namespace avx512
TIDE_END_TARGET
TIDE_BEGIN_TARGET("avx2,fma")
namespace avx2 {
#define TIDE_LANES 8
#define TIDE_ROWS 2
#include "bf16_matmul.inc"
#undef TIDE_LANES
#undef TIDE_ROWS
}  // namespace avx2
TIDE_END_TARGET
#endif

// What every CPU of this kind has: NEON on arm64, SSE2 on x86-64.
namespace baseline {
#define TIDE_LANES 4
#if defined(__aarch64__)
#define TIDE_ROWS 5
#else
#define TIDE_ROWS 3
#endif
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

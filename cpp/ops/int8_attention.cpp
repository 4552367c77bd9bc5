#include "int8_attention.h"

#include <cmath>
#include <cstring>
#include <type_traits>

#include "targets.h"

namespace tide_ops {
namespace {

typedef float Quad __attribute__((vector_size(16), aligned(4)));
template <int value>
using Int = std::integral_constant<int, value>;

constexpr std::int64_t kBlock = 64;                     // keys widened at a time
constexpr float kLowest = -1e30f, kHidden = -2 * 1e30f;  // of all scores; of a key that a query does not attend to

#if defined(__x86_64__)
TIDE_BEGIN_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
namespace avx512 {
#define TIDE_LANES 16
#define TIDE_ROWS 4
#include "int8_attention.inc"
#undef TIDE_LANES
#undef TIDE_ROWS
}  // namespace avx512
TIDE_END_TARGET
TIDE_BEGIN_TARGET("avx2,fma")
namespace avx2 {
#define TIDE_LANES 8
#define TIDE_ROWS 2
#include "int8_attention.inc"
#undef TIDE_LANES
#undef TIDE_ROWS
}  // namespace avx2
TIDE_END_TARGET
#endif

// What every CPU of this kind has: NEON on arm64, SSE2 on x86-64.
namespace baseline {
#define TIDE_LANES 4
#define TIDE_ROWS 2
#include "int8_attention.inc"
}  // namespace baseline

Int8AttentionKernel const kKernels[] = {
#if defined(__x86_64__)
    {"avx512",
     [] {
       return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("avx512dq");
     },
     avx512::store, avx512::attend, avx512::merge},
    {"avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }, avx2::store, avx2::attend,
     avx2::merge},
#endif
    {"baseline", [] { return true; }, baseline::store, baseline::attend, baseline::merge},
};

Int8AttentionKernel const* first_of(char const* name) {
  for (Int8AttentionKernel const& kernel : kKernels) {
    if ((name == nullptr || std::strcmp(name, kernel.name) == 0) && kernel.supported()) return &kernel;
  }
  return nullptr;
}

}  // namespace

std::int64_t partial_floats(Int8Attention const& attention, std::int64_t rows) { return rows * (attention.width + 2); }

std::int64_t scratch_floats(Int8Attention const& attention, std::int64_t rows) {
  return (rows + 1) * kChunk + kBlock * attention.width;
}

Int8AttentionKernel const* int8_attention_kernel(char const* name) {
  static Int8AttentionKernel const* const best = first_of(nullptr);
  return name == nullptr ? best : first_of(name);
}

}  // namespace tide_ops

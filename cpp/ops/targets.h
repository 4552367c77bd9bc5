// What the kernels of all instruction sets share.
#pragma once

#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

// Compiles the functions between TIDE_BEGIN_TARGET and TIDE_END_TARGET for an instruction set.
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

namespace tide_ops {

template <int value>
using Int = std::integral_constant<int, value>;

#if defined(__x86_64__)
inline bool cpu_has_f16c() {  // which not every compiler knows as a feature
  unsigned a, b, c = 0, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
inline bool cpu_has_avx2() {
  static bool const f16c = cpu_has_f16c();  // once: a virtual machine may take long to say
  return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
inline bool cpu_has_avx512() {
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

}  // namespace tide_ops

// What the kernels of all instruction sets share.
#pragma once

#include <cstdlib>
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

// Vectors of 64 bytes, which Clang 18 to 21 name as a feature of its own.
#if defined(__clang__) && __clang_major__ >= 18 && __clang_major__ <= 21
#define TIDE_AVX512 "avx512f,avx512bw,avx512vl,avx512dq,evex512,avx2,fma"
#else
#define TIDE_AVX512 "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"
#endif

namespace tide_ops {

template <int value>
using Int = std::integral_constant<int, value>;

// The largest instruction set to use, from the environment as ONEDNN_MAX_CPU_ISA; null: there is no limit.
inline char const* instruction_limit() { return std::getenv("TIDE_INSTRUCTIONS"); }

inline bool instructions_limited_to(char const* name) {
  char const* const limit = instruction_limit();
  return limit != nullptr && std::strcmp(limit, name) == 0;
}

#if defined(__x86_64__)
// The instruction sets of this CPU that its system saves registers of (Intel's manual, volume 1, 14.3 and 15.2), up to that of
// the environment. Compilers' own __builtin_cpu_supports needs a run-time library that not each of them has.
struct CpuFeatures {
  bool avx2 = false, avx512 = false, avx512_vnni = false;  // with FMA and F16C; with F, BW, DQ and VL

  CpuFeatures() {
    constexpr unsigned kSaved = 1u << 27, kVectors = 0x6, kMasks = 0xe6;  // OSXSAVE; XMM and YMM; those of AVX512 too
    constexpr unsigned kAvx2 = 1u << 5, kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31, kVnni = 1u << 11;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kSaved) == 0) return;
    bool const fused = (c & bit_FMA) != 0 && (c & bit_F16C) != 0 && !instructions_limited_to("baseline");
    unsigned saved = 0, high = 0;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return;
    avx2 = fused && (saved & kVectors) == kVectors && (b & kAvx2) != 0;
    avx512 = avx2 && !instructions_limited_to("avx2") && (saved & kMasks) == kMasks && (b & kAvx512) == kAvx512;
    avx512_vnni = avx512 && (c & kVnni) != 0;
  }
};

inline CpuFeatures const& cpu() {
  static CpuFeatures const features;  // once: a virtual machine may take long to say
  return features;
}
#endif

}  // namespace tide_ops

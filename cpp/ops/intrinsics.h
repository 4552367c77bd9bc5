// Single instructions as functions.
#pragma once

#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of GCC 12's own header
#endif
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* Types that the C interfaces of all kernels share: element types and norms. Plain C. */
#ifndef TIDE_COMMON_TYPES_H
#define TIDE_COMMON_TYPES_H

#include <stdint.h>

#if defined(_WIN32)
#define TIDE_API __declspec(dllexport)
#else
#define TIDE_API __attribute__((visibility("default")))
#endif

enum { TIDE_BLOCK_THREADS = 512 }; /* of every kernel */

enum TideType { TIDE_FLOAT32 = 0, TIDE_FLOAT16 = 1, TIDE_BFLOAT16 = 2 };

enum TideNorm { TIDE_NORM_NONE = 0, TIDE_NORM_RMS = 1, TIDE_NORM_LAYER = 2 };

/* normalized = (x - mean) * scale / sqrt(mean((x - mean)^2) + epsilon) + shift; RMSNorm has mean 0.
   `scale` [hidden]; `shift` [hidden] or NULL. */
typedef struct TideNormArgs {
  int32_t kind; /* TideNorm; with NONE nothing else is read */
  float epsilon;
  const void* scale;
  const void* shift;
} TideNormArgs;

#endif

/* TideRoute: the router of a checkpoint, for any number of tokens. C interface; all pointers are device memory.

   z = normalized @ down [+ confidence^T of the shortlist's two best log-probabilities]
   score = sigmoid(silu(z) @ up + bias);  exit = score > threshold (never for NaN)
   where the log-probabilities are those of log_softmax(normalized @ shortlist), and `normalized` is the states after
   the norm.

   A row's score depends on that row alone, bit for bit: not on the other rows nor on how many there are. */
#ifndef TIDE_ROUTE_KERNEL_CUH
#define TIDE_ROUTE_KERNEL_CUH

#include "common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct TideRouteArgs {
  int32_t states_type;     /* TideType */
  int32_t weights_type;    /* of all weights, the norm's included: states_type or TIDE_FLOAT32 */
  int32_t threshold_type;  /* TideType */
  int32_t reserved;        /* 0 */
  int64_t rows;            /* tokens; 0 does nothing */
  int64_t hidden;
  int64_t bottleneck;
  int64_t shortlist;       /* tokens in the shortlist; 0 = none, else at least 2 */
  int64_t states_stride;   /* elements from one row of `states` to the next */
  int64_t threshold_stride; /* elements from one row's threshold to the next; 0 = one threshold for all */
  TideNormArgs norm;
  const void* states;      /* [rows, hidden] */
  const void* down;        /* [hidden, bottleneck] */
  const void* up;          /* [bottleneck] */
  const void* bias;        /* [1] */
  const void* shortlist_weight; /* [hidden, shortlist] */
  const void* confidence;  /* [2, bottleneck] */
  const void* threshold;
  float* scores;           /* [rows] out */
  int32_t* exits;          /* [rows] out: 1 or 0 */
} TideRouteArgs;

/* Bytes of workspace for this many rows or fewer; every other size must be set. 256-byte alignment is needed. */
TIDE_API int64_t tide_route_workspace(const TideRouteArgs* args);

/* Starts the work on `stream` and returns. cudaErrorInvalidValue: a size, type or pointer is unusable. */
TIDE_API cudaError_t tide_route(const TideRouteArgs* args, void* workspace, int64_t workspace_bytes, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif

/* TideExit: what a checkpoint does with each slot's last token. C interface; all pointers are device memory.

   x = states[slot, last_tokens[slot]]
   x = x + (x @ lens_down) @ lens_up + lens_bias, with a lens
   n = norm(x), as the states' type holds it
   z = n @ down [+ confidence^T of the two best log-probabilities of log_softmax(n @ shortlist)]
   score = sigmoid(silu(z) @ up + bias);  exits = score > threshold (never for NaN)
   exit_states[slot, 0] = n where the slot exits; all else in exit_states stays as it is.

   Sums are float32. A slot's results depend on that slot alone, bit for bit: not on the others nor on how many there are. */
#ifndef TIDE_EXIT_KERNEL_CUH
#define TIDE_EXIT_KERNEL_CUH

#include "common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct TideExitArgs {
  int32_t states_type; /* TideType, of states, exit_states, lens and norm; router and thresholds are float32 */
  int32_t reserved;    /* 0 */
  int64_t slots;       /* 0 does nothing */
  int64_t tokens;      /* of each slot in `states` */
  int64_t hidden;
  int64_t exit_rows;   /* of each slot in `exit_states` */
  int64_t bottleneck;
  int64_t shortlist;   /* tokens in the shortlist; 0 = none, else at least 2 */
  int64_t lens_rank;   /* 0 = no lens */
  TideNormArgs norm;
  const void* states;          /* [slots, tokens, hidden] */
  const int64_t* last_tokens;  /* [slots], each in 0 .. tokens - 1 */
  const float* thresholds;     /* [slots] */
  const float* down;           /* [hidden, bottleneck] */
  const float* up;             /* [bottleneck] */
  const float* bias;           /* [1] */
  const float* shortlist_weight; /* [hidden, shortlist] */
  const float* confidence;     /* [2, bottleneck] */
  const void* lens_down;       /* [hidden, lens_rank] */
  const void* lens_up;         /* [lens_rank, hidden] */
  const void* lens_bias;       /* [hidden] */
  void* exit_states;           /* [slots, exit_rows, hidden], written in place */
  float* scores;               /* [slots] out */
  int32_t* exits;              /* [slots] out: 1 or 0 */
} TideExitArgs;

/* Bytes of workspace for this many slots or fewer; every other size must be set. 256-byte alignment is needed. */
TIDE_API int64_t tide_exit_workspace(const TideExitArgs* args);

/* uint32 numbers by which a launch's blocks count what is done. The caller makes them 0 once; every call leaves them 0.
   Calls that share them, or a workspace, must follow each other: one stream's do. */
#define TIDE_EXIT_COUNTERS 193

/* Starts the work on `stream` and returns. cudaErrorInvalidValue: a size, type or pointer is unusable. */
TIDE_API cudaError_t tide_exit(const TideExitArgs* args, void* workspace, int64_t workspace_bytes, uint32_t* counters,
                               cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif

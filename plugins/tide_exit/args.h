/* The arguments of TideExit (kernel.cuh), without CUDA's headers. Plain C. */
#ifndef TIDE_EXIT_ARGS_H
#define TIDE_EXIT_ARGS_H

#include "../common/types.h"

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

/* uint32 numbers by which a launch's blocks count what is done. The caller makes them 0 once; every call leaves them 0.
   Calls that share them, or a workspace, must follow each other: one stream's do. */
#define TIDE_EXIT_COUNTERS 193

#endif

/* TideExitScatter: writes the rows that exit at a checkpoint to the output. C interface; device pointers.

   Row i with exits[i] != 0, going to d = destination[i] (or i), where exit_layers[d] == 0, that is, the first time:
       output[d] = norm(lens(states[i]));  exit_layers[d] = layer;  counts[checkpoint] += 1
   lens(x) = x + (x @ lens_down) @ lens_up + lens_bias, or x. All other rows of the outputs stay as they are, also where
   d is outside [0, output_rows). No two rows may have the same destination. */
#ifndef TIDE_EXIT_SCATTER_KERNEL_CUH
#define TIDE_EXIT_SCATTER_KERNEL_CUH

#include "common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct TideExitScatterArgs {
  int32_t states_type;  /* TideType, of states and output */
  int32_t weights_type; /* of lens and norm: states_type or TIDE_FLOAT32 */
  int32_t layer;        /* layers run at this checkpoint, at least 1 */
  int32_t checkpoint;   /* which of `counts` */
  int64_t rows;
  int64_t hidden;
  int64_t lens_rank;     /* 0 = no lens */
  int64_t states_stride; /* elements from row to row */
  int64_t output_rows;
  int64_t output_stride;
  TideNormArgs norm;
  const void* states;    /* [rows, hidden] */
  const void* lens_down; /* [hidden, lens_rank] */
  const void* lens_up;   /* [lens_rank, hidden] */
  const void* lens_bias; /* [hidden] */
  const int32_t* exits;  /* [rows], as TideRoute writes them */
  const int32_t* destination; /* [rows], or NULL: row i goes to row i */
  void* output;          /* [output_rows, hidden], written in place */
  int32_t* exit_layers;  /* [output_rows], in place; 0 = has not left */
  int64_t* counts;       /* [more than checkpoint], in place */
} TideExitScatterArgs;

/* Bytes of workspace for this many rows or fewer; 0 without a lens. 256-byte alignment is needed. */
TIDE_API int64_t tide_exit_scatter_workspace(const TideExitScatterArgs* args);

/* Starts the work on `stream` and returns. cudaErrorInvalidValue: a size, type or pointer is unusable. */
TIDE_API cudaError_t tide_exit_scatter(const TideExitScatterArgs* args, void* workspace, int64_t workspace_bytes,
                                       cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif

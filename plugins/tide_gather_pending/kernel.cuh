/* TideGatherPending: appends new states to the pending states before a segment, in the segment's input. C interface;
   device pointers.

   `pending` [batch, capacity, hidden] is both the pending buffer and the segment's input, so that only the new states
   are copied. For every sequence b with take[b] != 0, or all if `take` is NULL:
       pending[b, counts[b] : counts[b] + tokens] = states[b];  counts[b] += tokens
   and then for all b, with c = counts[b]:  positions[b] = lengths[b] + (0, 1, ..., c - 1), then -1.
   Where the states do not fit, only `counts` is written, which then exceeds the capacity. After the
   segment has run, counts[b] = 0 empties the buffer. */
#ifndef TIDE_GATHER_PENDING_KERNEL_CUH
#define TIDE_GATHER_PENDING_KERNEL_CUH

#include "common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct TideGatherPendingArgs {
  int64_t batch;
  int64_t tokens;        /* new ones of each sequence; 0 only writes positions */
  int64_t capacity;      /* tokens that fit into `pending` */
  int64_t token_bytes;   /* of one token's state */
  const void* states;    /* [batch, tokens, token_bytes] */
  const int32_t* take;   /* [batch], or NULL */
  const int32_t* lengths; /* [batch], tokens that the segment has in its K/V cache */
  void* pending;         /* [batch, capacity, token_bytes], in place */
  int32_t* counts;       /* [batch], in place */
  int32_t* positions;    /* [batch, capacity] out */
} TideGatherPendingArgs;

/* Starts the work on `stream` and returns. cudaErrorInvalidValue: a size or pointer is unusable. */
TIDE_API cudaError_t tide_gather_pending(const TideGatherPendingArgs* args, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif

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

#include <cuda_runtime_api.h>

#include "tide_exit/args.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of workspace for this many slots or fewer; every other size must be set. 256-byte alignment is needed. */
TIDE_API int64_t tide_exit_workspace(const TideExitArgs* args);

/* Starts the work on `stream` and returns. cudaErrorInvalidValue: a size, type or pointer is unusable. */
TIDE_API cudaError_t tide_exit(const TideExitArgs* args, void* workspace, int64_t workspace_bytes, uint32_t* counters,
                               cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif

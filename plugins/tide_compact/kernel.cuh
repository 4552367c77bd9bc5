/* TideCompact: separates the rows that stay from those that exit, each in order. C interface; device pointers.

   The rows with exits[i] == 0, in ascending order, are copied to `staying` and their numbers to `staying_rows`; the
   others to `leaving` and `leaving_rows`; how many of each there are, to `sizes`. Any number of rows. */
#ifndef TIDE_COMPACT_KERNEL_CUH
#define TIDE_COMPACT_KERNEL_CUH

#include "common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct TideCompactArgs {
  int64_t rows;
  int64_t row_bytes;     /* of one row's elements; 0 copies none and gives the numbers alone */
  int64_t states_stride; /* bytes from row to row */
  const void* states;    /* [rows, row_bytes] */
  const int32_t* exits;  /* [rows] */
  void* staying;         /* room for `rows` rows of row_bytes */
  void* leaving;         /* likewise */
  int32_t* staying_rows; /* room for `rows` */
  int32_t* leaving_rows;
  int64_t* staying_size; /* [1] */
  int64_t* leaving_size; /* [1] */
} TideCompactArgs;

/* Bytes of workspace for this many rows or fewer. 256-byte alignment is needed. */
TIDE_API int64_t tide_compact_workspace(const TideCompactArgs* args);

/* Starts the work on `stream` and returns. With 0 rows the sizes are still written. cudaErrorInvalidValue: a size or
   pointer is unusable. */
TIDE_API cudaError_t tide_compact(const TideCompactArgs* args, void* workspace, int64_t workspace_bytes,
                                  cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif

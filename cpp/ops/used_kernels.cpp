// Which kernels the operators use. tests/operators/kernels.cpp takes the place of this file.
#include "attention.h"
#include "recurrence.h"

namespace tide_ops {

AttentionKernel const& used_attention_kernel() { return *attention_kernel(); }

RecurrenceKernel const& used_recurrence_kernel() { return *recurrence_kernel(); }

}  // namespace tide_ops

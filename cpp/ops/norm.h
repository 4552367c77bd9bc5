// Norms of hidden states over their last dimension. Chosen for the CPU it runs on.
#pragma once

#include <cstdint>

namespace tide_ops {

// One row, and what it is multiplied by and moved by. All are of `size` floats, or null.
struct NormInputs {
  float const *x, *skip, *skip_bias;  // their sum is normalized
  float const *scale, *bias;          // bias: null, or added at the end
};

struct NormKernel {
  // Writes the sum unless `sum` is null, then its norm: by the root of the mean square (RMSNormalization) ...
  void (*rms)(NormInputs const& inputs, std::int64_t size, float epsilon, float* sum, float* y);
  // ... or by mean and variance (LayerNormalization).
  void (*layer)(NormInputs const& inputs, std::int64_t size, float epsilon, float* sum, float* y);
};

// The kernel of an instruction set; without a name, the best for this CPU. Null if there is none, or not for this CPU.
NormKernel const* norm_kernel(char const* name = nullptr);

}  // namespace tide_ops

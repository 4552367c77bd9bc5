// Functions of each number: the gate of an MLP and others. Chosen for the CPU it runs on.
#pragma once

#include <cstdint>

namespace tide_ops {

// A result is the same whatever its place among the numbers.
struct ElementwiseKernel {
  // Multiplies `count` floats of `ups` by the SiLU of those of `gates`: x / (1 + e^-x).
  void (*gate)(float const* gates, std::int64_t count, float* ups);
  void (*sigmoid)(float const* x, std::int64_t count, float* y);
  void (*exponential)(float const* x, std::int64_t count, float* y);
  void (*gelu)(float const* x, std::int64_t count, float* y);       // x (1 + erf(x / sqrt 2)) / 2
  void (*tanh_gelu)(float const* x, std::int64_t count, float* y);  // with tanh in place of erf
};

// The kernel of an instruction set; without a name, the best for this CPU. Null if there is none, or not for this CPU.
ElementwiseKernel const* elementwise_kernel(char const* name = nullptr);

}  // namespace tide_ops

// Multiplies a row by a small matrix, for low-rank adapters. Chosen for the CPU it runs on.
#pragma once

#include <cstdint>

namespace tide_ops {

struct LoraKernel {
  // Adds x [k] times m, rows of `stride` floats of which the first n count, to y [n].
  void (*add)(float const* x, std::int64_t k, float const* m, std::int64_t stride, std::int64_t n, float* y);
};

// The kernel of an instruction set; without a name, the best for this CPU. Null if there is none, or not for this CPU.
LoraKernel const* lora_kernel(char const* name = nullptr);

}  // namespace tide_ops

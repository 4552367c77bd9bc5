// The gate of an MLP: SiLU(gate) * up, SiLU(x) being x / (1 + e^-x). Chosen for the CPU it runs on.
#pragma once

#include <cstdint>

namespace tide_ops {

struct GateKernel {
  // Multiplies `count` floats of `ups` by the SiLU of those of `gates`. Each is the same whatever its place.
  void (*apply)(float const* gates, std::int64_t count, float* ups);
};

// The kernel of an instruction set; without a name, the best for this CPU. Null if there is none, or not for this CPU.
GateKernel const* gate_kernel(char const* name = nullptr);

}  // namespace tide_ops

// What the library in the Python package exports: for ONNX Runtime, and for Python to check it before.
#include "bf16_matmul.h"
#include "operators.h"

#define TIDE_EXPORTED extern "C" __attribute__((visibility("default")))

TIDE_EXPORTED tide_ops::abi::Status* RegisterCustomOps(tide_ops::abi::SessionOptions* options,
                                                       tide_ops::abi::ApiBase const* base) {
  return tide_ops::register_operators(options, base);
}

TIDE_EXPORTED char const* tide_ops_version() { return TIDE_EXPORT_VERSION; }

// The kernel of an instruction set: y [M, N] = x [M, K] times the transpose of weights [N, K]; `split` is memory for
// M * K floats. 0, or 1 if this CPU has no such instructions.
TIDE_EXPORTED int tide_ops_bf16_matmul(char const* instruction_set, float const* x, std::uint16_t const* weights,
                                       std::int64_t m_size, std::int64_t n_size, std::int64_t k_size, float* split,
                                       float* y) {
  tide_ops::Bf16Kernel const* const kernel = tide_ops::bf16_kernel(instruction_set);
  if (kernel == nullptr) return 1;
  for (std::int64_t m = 0; m < m_size; ++m) kernel->split_row(x + m * k_size, k_size, split + m * k_size);
  kernel->multiply({split, k_size, m_size, k_size}, weights, n_size, y, n_size);
  return 0;
}

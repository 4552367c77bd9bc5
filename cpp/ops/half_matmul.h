// float32 [M, K] times the transpose of bfloat16 or float16 [N, K], in float32: each weight is widened in a register, so
// half the bytes are read from memory. Chosen for the CPU it runs on.
#pragma once

#include <cstdint>

namespace tide_ops {

enum class HalfFormat { kBf16, kFp16 };

// Rows of inputs as `HalfKernel::split_row` leaves them, each beginning at a multiple of 64 bytes.
struct SplitRows {
  float const* data;
  std::int64_t m_size, k_size;

  static std::int64_t stride(std::int64_t k_size) { return (k_size + 31) / 32 * 32; }  // floats from row to row
};

struct HalfKernel {
  // Reorders a row of k_size floats as `multiply` reads it, up to the stride.
  void (*split_row)(float const* x, std::int64_t k_size, float* split);
  // Multiplies x by `n_size` rows of weights; y[m * y_stride + n]. A row of y is the same whatever m_size is.
  void (*multiply)(SplitRows const& x, std::uint16_t const* weights, std::int64_t n_size, float* y,
                   std::int64_t y_stride);
};

// The kernel of an instruction set; without a name, the best for this CPU. Null if there is none, or not for this CPU.
HalfKernel const* half_kernel(HalfFormat format, char const* name = nullptr);

}  // namespace tide_ops

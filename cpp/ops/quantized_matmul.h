// float32 [M, K] times the transpose of integers of 4 or 8 bits [N, K] in blocks with a scale each, as MatMulNBits
// stores them and computes with them at accuracy level 4: the inputs are rounded to 8 bits, block by block, too.
#pragma once

#include <cstdint>

namespace tide_ops {

// 128 inputs of a row. Lane i of a vector adds up the products of inputs 8i to 8i + 7: four of `first`, four of
// `second`.
struct alignas(64) RoundedInputs {
  std::int8_t first[64], second[64];
  std::int32_t start[16];  // corrects a block's sum, in one of its lanes: the integers are 8 or 128 too large
  float scales[16];        // of the inputs of a lane
};

// 512 inputs of a row in place of four such groups, for integers of 4 bits in blocks of 32 or more. Lane 4j + i adds
// up the products of 32 inputs from 128i + 32j on: 8 of each pair of parts. So sums are scaled a quarter as often.
constexpr std::int64_t kWide = 512;
struct alignas(64) WideInputs {
  std::int8_t first[4][64], second[4][64];
  std::int32_t start[16];
  float scales[16];
};
static_assert(sizeof(WideInputs) <= 4 * sizeof(RoundedInputs));

struct IntegerWeights {
  std::uint8_t const* integers;  // [N, blocks, block_size * bits / 8]
  float const* scales;           // [N, blocks]
  std::int64_t blocks, block_size, bits;

  std::int64_t row_bytes() const { return blocks * block_size * bits / 8; }
  std::int64_t groups() const { return (blocks * block_size + 127) / 128; }  // RoundedInputs of a row
  std::int64_t wide_groups() const { return bits == 4 && block_size >= 32 ? blocks * block_size / kWide : 0; }
};

// Whether this CPU has the instructions: AVX-512 VNNI.
bool integers_supported();

inline bool is_block_size(std::int64_t size) { return size >= 16 && size <= 256 && (size & (size - 1)) == 0; }

// Rounds a row of `k_size` inputs.
void round_row(float const* x, std::int64_t k_size, IntegerWeights const& weights, RoundedInputs* row);

// From so many rows of inputs on, weights are transposed first, in panels of so many rows: that pays for itself.
constexpr std::int64_t kManyRows = 9, kPanelRows = 32;

// Multiplies `m_size` rows by `n_size` rows of weights from row `n` on, to y [.., y_stride]. A row of y is the same to
// the bit whatever m_size is.
void multiply_integers(RoundedInputs const* x, std::int64_t m_size, IntegerWeights const& weights, std::int64_t n,
                       std::int64_t n_size, float* y, std::int64_t y_stride);

}  // namespace tide_ops

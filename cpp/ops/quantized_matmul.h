// float32 [M, K] times the transpose of integers of 4 or 8 bits [N, K] in blocks with a scale each, as MatMulNBits
// stores them and computes with them at accuracy level 4: the inputs are rounded to 8 bits, block by block, too. Numbers of
// MXFP4 (OCP Microscaling Formats 1.0: E2M1 in blocks of 32 whose scales are powers of two) are integers of half the scale.
#pragma once

#include <cstdint>
#include <memory>

namespace tide_ops {

enum class IntegerFormat { kInt4, kInt8, kMxfp4 };

inline std::int64_t bits_of(IntegerFormat format) { return format == IntegerFormat::kInt8 ? 8 : 4; }

// Weights of one or several matrices as a model stores them.
struct IntegerWeights {
  std::uint8_t const* integers;  // [matrices, N, blocks, block_size * bits / 8]
  void const* scales;            // [matrices, N, blocks]: float, or of MXFP4 E8M0, exponents of two plus 127
  std::int64_t matrices, rows, blocks, block_size;
  IntegerFormat format;
  bool in_turn;  // panels of one matrix and of the next alternate, as both are read at once

  std::int64_t row_bytes() const { return blocks * block_size * bits_of(format) / 8; }
  float scale(std::int64_t index) const;  // of the integers
  std::int64_t scales_bytes() const { return matrices * rows * blocks * (format == IntegerFormat::kMxfp4 ? 1 : 4); }
};

// The same weights in the order in which they are read: panels of 32 rows, block by block, each with the scales of its
// rows after it. A vector holds four integers of 16 rows (of 4 bits: and four more, of the block's other half), the next
// one those of the other 16. Scales are float16 where all of them are numbers of that type.
class PackedWeights {
 public:
  static constexpr std::int64_t kRows = 32;

  // Allocates the memory, in huge pages; `fill` is to follow. Throws std::bad_alloc.
  explicit PackedWeights(IntegerWeights const& weights);

  std::int64_t panels_of_one() const { return (rows + kRows - 1) / kRows; }
  std::int64_t panels() const { return matrices * panels_of_one(); }
  std::int64_t vectors() const { return block_size * bits_of(format) / 32; }  // of integers, in a block of 16 rows
  std::int64_t panel_bytes() const { return blocks * kRows * (block_size * bits_of(format) / 8 + scale_bytes); }
  std::uint8_t const* panel(std::int64_t index) const { return memory_.get() + index * panel_bytes(); }

  // Packs one panel of `weights`. Rows beyond the last are 0.
  void fill(IntegerWeights const& weights, std::int64_t panel);

  std::int64_t const matrices, rows, blocks, block_size, scale_bytes;
  IntegerFormat const format;
  bool const in_turn;

 private:
  std::shared_ptr<std::uint8_t> const memory_;
};

// Inputs [M, K] rounded to 8 bits: of each row the integers of all blocks, their scales, and what a block's sum starts
// with, as the weights are stored 8, 128 or 12 too large.
struct RoundedInputs {
  char* rows;
  std::int64_t blocks, block_size;  // of the weights
  IntegerFormat format;

  std::int64_t scales() const { return blocks * block_size; }  // bytes from a row's begin
  std::int64_t starts() const { return scales() + 4 * blocks; }
  std::int64_t stride() const { return (starts() + 4 * blocks + 63) / 64 * 64; }
};

struct IntegerKernel {
  // Rounds `k_size` inputs of row m, to its blocks from `first` on; those of the last block beyond them are 0. The scale of a
  // block with a number that is not finite is NaN.
  void (*round)(RoundedInputs const& inputs, float const* x, std::int64_t k_size, std::int64_t m, std::int64_t first);
  // Multiplies `m_size` rows by `count` rows from panel `panel` on, to y [.., y_stride]. Where matrices are stored in turn,
  // by as many rows of each of both, to the y of each. A row of y is the same to the bit whatever m_size is.
  void (*multiply)(RoundedInputs const& x, std::int64_t m_size, PackedWeights const& weights, std::int64_t panel,
                   std::int64_t count, float* const (&y)[2], std::int64_t y_stride);
};

// The kernel of an instruction set, AVX-512 VNNI or AVX2, which give the same bits; without a name, the best for this CPU.
// Null if there is none, or not for this CPU.
IntegerKernel const* integer_kernel(char const* name = nullptr);

inline bool is_block_size(std::int64_t size) { return size >= 16 && size <= 256 && (size & (size - 1)) == 0; }

}  // namespace tide_ops

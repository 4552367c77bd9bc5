// float32 [M, K] times the transpose of integers of 4 or 8 bits [N, K] in blocks with a scale each, as MatMulNBits
// stores them and computes with them at accuracy level 4: the inputs are rounded to 8 bits, block by block, too.
#pragma once

#include <cstdint>
#include <memory>

namespace tide_ops {

// Weights as a model stores them: of a matrix, or of two, one after the other, whose rows are read in pairs.
struct IntegerWeights {
  std::uint8_t const* integers;  // [matrices, N, blocks, block_size * bits / 8]
  float const* scales;           // [matrices, N, blocks]
  std::int64_t matrices, rows, blocks, block_size, bits;

  std::int64_t row_bytes() const { return blocks * block_size * bits / 8; }
};

// The same weights in the order in which they are read: panels of 32 rows, block by block, each with the scales of its
// rows after it. A vector holds four integers of 16 rows (of 4 bits: and four more, of the block's other half), the next
// one those of the other 16. After a panel of the first matrix comes the same of the second. Scales are float16 where all
// of them are numbers of that type.
class PackedWeights {
 public:
  static constexpr std::int64_t kRows = 32, kVector = 64;

  // Allocates the memory, in huge pages; `fill` is to follow. Throws std::bad_alloc.
  explicit PackedWeights(IntegerWeights const& weights);

  std::int64_t panels() const { return matrices * ((rows + kRows - 1) / kRows); }
  std::int64_t vectors() const { return block_size * bits / 32; }  // of integers, in a block of 16 rows
  std::int64_t panel_bytes() const { return blocks * kRows * (block_size * bits / 8 + scale_bytes); }
  std::uint8_t const* panel(std::int64_t index) const { return memory_.get() + index * panel_bytes(); }

  // Packs one panel of `weights`. Rows beyond the last are 0.
  void fill(IntegerWeights const& weights, std::int64_t panel);

  std::int64_t const matrices, rows, blocks, block_size, bits, scale_bytes;

 private:
  std::shared_ptr<std::uint8_t> const memory_;
};

// Inputs [M, K] rounded to 8 bits: of each row the integers of all blocks, their scales, and what a block's sum starts
// with, as the weights are stored 8 or 128 too large.
struct RoundedInputs {
  char* rows;
  std::int64_t blocks, block_size, bits;  // of the weights

  std::int64_t scales() const { return blocks * block_size; }  // bytes from a row's begin
  std::int64_t starts() const { return scales() + 4 * blocks; }
  std::int64_t stride() const { return (starts() + 4 * blocks + 63) / 64 * 64; }

  // Rounds `k_size` inputs of row m, to its blocks from `first` on; those of the last block beyond them are 0.
  void round(float const* x, std::int64_t k_size, std::int64_t m, std::int64_t first = 0) const;
};

// Whether this CPU has the instructions: AVX-512 VNNI.
bool integers_supported();

inline bool is_block_size(std::int64_t size) { return size >= 16 && size <= 256 && (size & (size - 1)) == 0; }

// Multiplies `m_size` rows by `count` rows of each matrix from row `n` on, which a panel begins with, to the `y` of each
// matrix, [.., y_stride]. A row of y is the same to the bit whatever m_size is.
void multiply_integers(RoundedInputs const& x, std::int64_t m_size, PackedWeights const& weights, std::int64_t n,
                       std::int64_t count, float* const (&y)[2], std::int64_t y_stride);

}  // namespace tide_ops

#include "quantized_matmul.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "weight_copies.h"

namespace tide_ops {
namespace {

// The float16 that equals `value`; false if none does, or none that has all its bits.
bool as_float16(float value, std::uint16_t& half) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  std::uint32_t const magnitude = bits & 0x7fffffff, smallest = 0x38800000, infinite = 0x47800000;
  if (magnitude != 0 && (magnitude < smallest || magnitude >= infinite || (bits & 0x1fff) != 0)) return false;
  half = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
  if (magnitude != 0) half = static_cast<std::uint16_t>(half | (magnitude - 0x38000000) >> 13);
  return true;
}

bool all_float16(IntegerWeights const& weights) {
  std::uint16_t half;
  std::int64_t const count = weights.matrices * weights.rows * weights.blocks;
  for (std::int64_t i = 0; i < count; ++i) {
    if (!as_float16(weights.scale(i), half)) return false;
  }
  return true;
}

}  // namespace

float IntegerWeights::scale(std::int64_t index) const {
  if (format != IntegerFormat::kMxfp4) return static_cast<float const*>(scales)[index];
  int const stored = static_cast<std::uint8_t const*>(scales)[index];
  return stored == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(0.5f, stored - 127);
}

PackedWeights::PackedWeights(IntegerWeights const& weights)
    : matrices(weights.matrices), rows(weights.rows), blocks(weights.blocks), block_size(weights.block_size),
      scale_bytes(all_float16(weights) ? 2 : 4), format(weights.format), in_turn(weights.in_turn),
      memory_(weight_memory(static_cast<std::size_t>(panels() * panel_bytes()))) {}

}  // namespace tide_ops

#if defined(__x86_64__)
#include "intrinsics.h"
#include "targets.h"

namespace tide_ops {
namespace {

constexpr std::int64_t kAhead = 4096;  // bytes from those that are multiplied by to those that are prefetched

TIDE_BEGIN_TARGET(TIDE_AVX512 ",avx512vnni,f16c")
namespace vnni {
#define TIDE_LANES 16
#include "quantized_matmul.inc"
#undef TIDE_LANES
}  // namespace vnni
TIDE_END_TARGET
TIDE_BEGIN_TARGET("avx2,fma,f16c")
namespace avx2 {
#define TIDE_LANES 8
#include "quantized_matmul.inc"
#undef TIDE_LANES
}  // namespace avx2
TIDE_END_TARGET

// Two integers of 4 bits in a byte: those of the first half of a block and of the second, not neighbours.
void join_halves(std::uint8_t const* from, std::int64_t bytes, std::uint8_t* to) {
  alignas(64) std::uint8_t apart[256];
  __m128i const nibble = _mm_set1_epi8(15);
  auto const eight = [](std::uint8_t const* at) { return _mm_loadl_epi64(reinterpret_cast<__m128i const*>(at)); };
  for (std::int64_t i = 0; i < bytes; i += 8) {
    __m128i const both = eight(from + i);
    __m128i const low = _mm_and_si128(both, nibble), high = _mm_and_si128(_mm_srli_epi16(both, 4), nibble);
    _mm_store_si128(reinterpret_cast<__m128i*>(apart + 2 * i), _mm_unpacklo_epi8(low, high));
  }
  for (std::int64_t i = 0; i < bytes; i += 8) {
    __m128i const joined = _mm_or_si128(eight(apart + i), _mm_slli_epi16(eight(apart + bytes + i), 4));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to + i), joined);
  }
}

}  // namespace

IntegerKernel const* integer_kernel(char const* name) {
  auto const is = [name](char const* set) { return name == nullptr || std::strcmp(name, set) == 0; };
  if (is("vnni") && cpu().avx512_vnni) return &vnni::kernel;
  return is("avx2") && cpu().avx2 ? &avx2::kernel : nullptr;
}

void PackedWeights::fill(IntegerWeights const& weights, std::int64_t panel) {
  std::uint8_t* to = memory_.get() + panel * panel_bytes();
  std::int64_t const matrix = in_turn ? panel % matrices : panel / panels_of_one();
  std::int64_t const in_matrix = (in_turn ? panel / matrices : panel % panels_of_one()) * kRows;
  std::int64_t const first = matrix * rows + in_matrix;
  std::int64_t const stored = std::min(kRows, rows - in_matrix), bytes = block_size * bits_of(format) / 8;
  for (std::int64_t block = 0; block < blocks; ++block, to += kRows * (bytes + scale_bytes)) {
    std::uint8_t* const scales = to + kRows * bytes;
    for (std::int64_t row = 0; row < kRows; ++row) {
      alignas(64) std::uint8_t integers[256];
      if (row < stored) {
        std::uint8_t const* const from = weights.integers + (first + row) * weights.row_bytes() + block * bytes;
        float const scale = weights.scale((first + row) * blocks + block);
        std::uint16_t narrow = 0;
        if (scale_bytes == 2) as_float16(scale, narrow);
        std::memcpy(scales + row * scale_bytes, scale_bytes == 2 ? static_cast<void const*>(&narrow) : &scale,
                    static_cast<std::size_t>(scale_bytes));
        if (format == IntegerFormat::kInt8) {
          std::memcpy(integers, from, static_cast<std::size_t>(bytes));
        } else {
          join_halves(from, bytes, integers);
        }
      } else {
        std::memset(scales + row * scale_bytes, 0, static_cast<std::size_t>(scale_bytes));
        std::memset(integers, 0, static_cast<std::size_t>(bytes));
      }
      for (std::int64_t i = 0; i < bytes; i += 4) std::memcpy(to + kRows * i + 4 * row, integers + i, 4);
    }
  }
}

}  // namespace tide_ops

#else

namespace tide_ops {

IntegerKernel const* integer_kernel(char const*) { return nullptr; }
void PackedWeights::fill(IntegerWeights const&, std::int64_t) {}

}  // namespace tide_ops

#endif

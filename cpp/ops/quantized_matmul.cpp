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
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of GCC 12's own header
#endif
#include <immintrin.h>

#include "targets.h"

namespace tide_ops {
namespace {

TIDE_BEGIN_TARGET(TIDE_AVX512 ",avx512vnni")

constexpr std::int64_t kAhead = 4096;  // bytes from those that are multiplied by to those that are prefetched
constexpr int kTileRows = 6;           // rows of inputs that are multiplied at a time: for more there are no registers

template <typename T>
inline T value_at(char const* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

__mmask16 first_lanes(std::int64_t count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffff : count > 0 ? (1 << count) - 1 : 0);
}

// Multiplies kM rows of inputs from row m on by `count` rows of a panel; a lane is a row of weights. Blocks are added up
// one after the other whatever the size of the tile.
template <IntegerFormat kFormat, int kM>
inline __attribute__((always_inline)) void tile(RoundedInputs const& x, std::int64_t m, PackedWeights const& weights,
                                                std::int64_t panel, std::int64_t count, float* y,
                                                std::int64_t y_stride) {
  constexpr int kN = 2;
  constexpr std::int64_t kVector = PackedWeights::kVector;
  std::int64_t const x_stride = x.stride(), vectors = weights.vectors();
  std::int64_t const half = x.block_size / 2, scales_of_block = PackedWeights::kRows * weights.scale_bytes;
  bool const halves = weights.scale_bytes == 2;
  std::uint8_t const* from = weights.panel(panel);
  char const* numbers = x.rows + m * x_stride;
  char const *scales = numbers + x.scales(), *starts = numbers + x.starts();
  __m512i const nibble = _mm512_set1_epi8(15);
  // Twice the number of each code of E2M1, and 12.
  __m512i const doubled = _mm512_broadcast_i32x4(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  auto const low_nibbles = [&](__m512i both) {
    __m512i const codes = _mm512_and_si512(both, nibble);
    return kFormat == IntegerFormat::kMxfp4 ? _mm512_shuffle_epi8(doubled, codes) : codes;
  };
  __m512 sums[kM][kN];
#pragma GCC unroll 8
  for (int row = 0; row < kM; ++row) {
#pragma GCC unroll 2
    for (int n = 0; n < kN; ++n) sums[row][n] = _mm512_setzero_ps();
  }
  for (std::int64_t block = 0; block < x.blocks; ++block, numbers += x.block_size, scales += 4, starts += 4) {
    __m512i dot[kM][kN];
#pragma GCC unroll 8
    for (int row = 0; row < kM; ++row) {
#pragma GCC unroll 2
      for (int n = 0; n < kN; ++n) dot[row][n] = _mm512_set1_epi32(value_at<int>(starts + row * x_stride));
    }
    auto const multiply = [&](__m512i const(&integers)[kN], char const* four) {
#pragma GCC unroll 8
      for (int row = 0; row < kM; ++row) {
        __m512i const inputs = _mm512_set1_epi32(value_at<int>(four + row * x_stride));
#pragma GCC unroll 2
        for (int n = 0; n < kN; ++n) dot[row][n] = _mm512_dpbusd_epi32(dot[row][n], integers[n], inputs);
      }
    };
#pragma GCC unroll 4
    for (std::int64_t vector = 0; vector < vectors; ++vector, from += kN * kVector) {
      __m512i both[kN], integers[kN];
#pragma GCC unroll 2
      for (int n = 0; n < kN; ++n) {
        both[n] = _mm512_load_si512(from + n * kVector);
        __builtin_prefetch(from + n * kVector + kAhead);
        integers[n] = kFormat == IntegerFormat::kInt8 ? both[n] : low_nibbles(both[n]);
      }
      multiply(integers, numbers + 4 * vector);
      if (kFormat == IntegerFormat::kInt8) continue;
#pragma GCC unroll 2
      for (int n = 0; n < kN; ++n) integers[n] = low_nibbles(_mm512_srli_epi16(both[n], 4));
      multiply(integers, numbers + half + 4 * vector);
    }
    __m512 weight_scales[kN];
#pragma GCC unroll 2
    for (int n = 0; n < kN; ++n) {
      weight_scales[n] = halves ? _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<__m256i const*>(from) + n))
                                : _mm512_load_ps(reinterpret_cast<float const*>(from) + 16 * n);
    }
    from += scales_of_block;
#pragma GCC unroll 8
    for (int row = 0; row < kM; ++row) {
      __m512 const scale = _mm512_set1_ps(value_at<float>(scales + row * x_stride));
#pragma GCC unroll 2
      for (int n = 0; n < kN; ++n) {
        __m512 const both_scales = _mm512_mul_ps(weight_scales[n], scale);
        sums[row][n] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[row][n]), both_scales, sums[row][n]);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kM; ++row) {
#pragma GCC unroll 2
    for (int n = 0; n < kN; ++n) {
      _mm512_mask_storeu_ps(y + row * y_stride + 16 * n, first_lanes(count - 16 * n), sums[row][n]);
    }
  }
}

// Multiplies `rows` rows of inputs, of kM at most.
template <IntegerFormat kFormat, int kM>
void tile_of(std::int64_t rows, RoundedInputs const& x, std::int64_t m, PackedWeights const& weights,
             std::int64_t panel, std::int64_t count, float* y, std::int64_t y_stride) {
  if constexpr (kM > 1) {
    if (rows < kM) return tile_of<kFormat, kM - 1>(rows, x, m, weights, panel, count, y, y_stride);
  }
  tile<kFormat, kM>(x, m, weights, panel, count, y, y_stride);
}

template <IntegerFormat kFormat>
void multiply(RoundedInputs const& x, std::int64_t m_size, PackedWeights const& weights, std::int64_t panel,
              std::int64_t count, float* const (&y)[2], std::int64_t y_stride) {
  int const matrices = weights.in_turn ? 2 : 1;
  for (std::int64_t done = 0; done < count; done += PackedWeights::kRows) {
    for (int matrix = 0; matrix < matrices; ++matrix, ++panel) {
      for (std::int64_t m = 0, rows; m < m_size; m += rows) {  // rows are divided evenly, so that no tile is small
        std::int64_t const left = m_size - m, tiles = (left + kTileRows - 1) / kTileRows;
        rows = (left + tiles - 1) / tiles;
        float* const to = y[matrix] + m * y_stride + done;
        tile_of<kFormat, kTileRows>(rows, x, m, weights, panel, count - done, to, y_stride);
      }
    }
  }
}

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

bool integers_supported() {
  return cpu().avx512_vnni;
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

void RoundedInputs::round(float const* x, std::int64_t k_size, std::int64_t m, std::int64_t first) const {
  char* const row = rows + m * stride() + first * block_size;
  auto* const row_scales = reinterpret_cast<float*>(rows + m * stride() + scales()) + first;
  auto* const row_starts = reinterpret_cast<std::int32_t*>(rows + m * stride() + starts()) + first;
  int const excess = format == IntegerFormat::kInt4 ? 8 : format == IntegerFormat::kInt8 ? 128 : 12;
  for (std::int64_t block = 0; block * block_size < k_size; ++block) {
    std::int64_t const begin = block * block_size;
    __m512 largest = _mm512_setzero_ps();
    for (std::int64_t k = begin; k < begin + block_size; k += 16) {
      largest = _mm512_max_ps(largest, _mm512_abs_ps(_mm512_maskz_loadu_ps(first_lanes(k_size - k), x + k)));
    }
    float const most = _mm512_reduce_max_ps(largest);
    __m512 const inverse = _mm512_set1_ps(most > 0 ? 127.0f / most : 0.0f);
    __m512i sum = _mm512_setzero_si512();
    for (std::int64_t k = begin; k < begin + block_size; k += 16) {
      __m512 const inputs = _mm512_maskz_loadu_ps(first_lanes(k_size - k), x + k);
      __m512i const rounded = _mm512_cvtps_epi32(_mm512_mul_ps(inputs, inverse));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(row + k), _mm512_cvtepi32_epi8(rounded));
      sum = _mm512_add_epi32(sum, rounded);
    }
    row_scales[block] = most / 127.0f;
    row_starts[block] = -excess * _mm512_reduce_add_epi32(sum);
  }
}

void multiply_integers(RoundedInputs const& x, std::int64_t m_size, PackedWeights const& weights, std::int64_t panel,
                       std::int64_t count, float* const (&y)[2], std::int64_t y_stride) {
  switch (weights.format) {
    case IntegerFormat::kInt4: return multiply<IntegerFormat::kInt4>(x, m_size, weights, panel, count, y, y_stride);
    case IntegerFormat::kInt8: return multiply<IntegerFormat::kInt8>(x, m_size, weights, panel, count, y, y_stride);
    case IntegerFormat::kMxfp4: return multiply<IntegerFormat::kMxfp4>(x, m_size, weights, panel, count, y, y_stride);
  }
}

TIDE_END_TARGET

}  // namespace tide_ops

#else

namespace tide_ops {

bool integers_supported() { return false; }
void PackedWeights::fill(IntegerWeights const&, std::int64_t) {}
void RoundedInputs::round(float const*, std::int64_t, std::int64_t, std::int64_t) const {}
void multiply_integers(RoundedInputs const&, std::int64_t, PackedWeights const&, std::int64_t, std::int64_t,
                       float* const (&)[2], std::int64_t) {}

}  // namespace tide_ops

#endif

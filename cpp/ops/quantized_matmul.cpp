#include "quantized_matmul.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "kernel.h"

#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of GCC 12's own header
#endif
#include <immintrin.h>

#include "targets.h"

namespace tide_ops {
namespace {

TIDE_BEGIN_TARGET(TIDE_AVX512 ",avx512vnni")

#define TIDE_LANES 16
#include "lanes.inc"

constexpr std::int64_t kAhead = 4096;  // bytes from those that are multiplied by to those that are prefetched

// Rounds 16 * count inputs to multiples of `scale`, from `position` on in their group.
void round_segment(float const* x, std::int64_t size, std::int64_t count, float inverse, float scale,
                   std::int64_t position, std::int64_t bits, RoundedInputs& group) {
  __m128i const apart = bits == 4 ? _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)
                                  : _mm_setr_epi8(0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15);
  __m512i sum = _mm512_setzero_si512();
  for (std::int64_t i = 0; i < count; ++i, x += 16, size -= 16) {
    auto const mask = static_cast<__mmask16>(size >= 16 ? 0xffff : size > 0 ? (1 << size) - 1 : 0);
    __m512i const rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x), _mm512_set1_ps(inverse)));
    __m128i const bytes = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(rounded), apart);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(group.first + position / 2 + 8 * i), bytes);
    _mm_storeh_pd(reinterpret_cast<double*>(group.second + position / 2 + 8 * i), _mm_castsi128_pd(bytes));
    sum = _mm512_add_epi32(sum, rounded);
  }
  std::int64_t const lane = position / 8, lanes = 2 * count;
  std::fill_n(group.start + lane, lanes, 0);
  group.start[lane] = (bits == 4 ? -8 : -128) * _mm512_reduce_add_epi32(sum);
  std::fill_n(group.scales + lane, lanes, scale);
}

// Rounds 16 inputs from `position` on in their wide group.
void round_wide(__m512 x, float inverse, float scale, std::int64_t position, WideInputs& group) {
  __m512i const rounded = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(inverse)));
  __m128i const apart = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  alignas(16) std::int8_t bytes[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(bytes), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(rounded), apart));
  std::int64_t const lane = position % 128 / 32 * 4 + position / 128, part = position % 32 / 8;
  for (std::int64_t i = 0; i < 2; ++i) {
    std::memcpy(group.first[part + i] + 4 * lane, bytes + 4 * i, 4);
    std::memcpy(group.second[part + i] + 4 * lane, bytes + 8 + 4 * i, 4);
  }
  group.start[lane] = (part == 0 ? 0 : group.start[lane]) - 8 * _mm512_reduce_add_epi32(rounded);
  group.scales[lane] = scale;
}

// 512 integers of 4 bits: those that are multiplied by `first`, and by `second`, of WideInputs. A lane gets the bytes
// of 32 integers, 4 at a time.
inline __attribute__((always_inline)) void wide_integers_of(std::uint8_t const* from, __m512i (&first)[4],
                                                            __m512i (&second)[4]) {
  __m512i const a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 64);
  __m512i const c = _mm512_loadu_si512(from + 128), d = _mm512_loadu_si512(from + 192);
  __m512i const ab_low = _mm512_unpacklo_epi32(a, b), ab_high = _mm512_unpackhi_epi32(a, b);
  __m512i const cd_low = _mm512_unpacklo_epi32(c, d), cd_high = _mm512_unpackhi_epi32(c, d);
  __m512i const nibble = _mm512_set1_epi8(15);
  first[0] = _mm512_unpacklo_epi64(ab_low, cd_low);
  first[1] = _mm512_unpackhi_epi64(ab_low, cd_low);
  first[2] = _mm512_unpacklo_epi64(ab_high, cd_high);
  first[3] = _mm512_unpackhi_epi64(ab_high, cd_high);
#pragma GCC unroll 4
  for (int part = 0; part < 4; ++part) {
    second[part] = _mm512_and_si512(_mm512_srli_epi16(first[part], 4), nibble);
    first[part] = _mm512_and_si512(first[part], nibble);
  }
}

// 128 integers of 4 or 8 bits: those that are multiplied by `first`, and by `second`. Of the row `left` bytes are left.
template <int kBits>
inline __attribute__((always_inline)) void integers_of(std::uint8_t const* from, std::int64_t left, __m512i& first,
                                                       __m512i& second) {
  auto const some = [](std::int64_t bytes) -> __mmask64 {
    return bytes >= 64 ? ~0ull : bytes > 0 ? (1ull << bytes) - 1 : 0;
  };
  __m512i const low = _mm512_maskz_loadu_epi8(some(left), from);
  if (kBits == 4) {
    __m512i const nibble = _mm512_set1_epi8(15);
    first = _mm512_and_si512(low, nibble);
    second = _mm512_and_si512(_mm512_srli_epi16(low, 4), nibble);
  } else {
    __m512i const high = _mm512_maskz_loadu_epi8(some(left - 64), from + 64);
    __m512i const even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    first = _mm512_permutex2var_epi32(low, even, high);
    second = _mm512_permutex2var_epi32(low, _mm512_add_epi32(even, _mm512_set1_epi32(1)), high);
  }
}

// The scales of a row of weights for the lanes of a group.
struct LaneScales {
  __m512i block_of, wide_block_of;  // a lane's block, from the group's first on

  explicit LaneScales(std::int64_t block_size) {
    alignas(64) std::int32_t blocks[2][16];
    for (int lane = 0; lane < 16; ++lane) {
      blocks[0][lane] = static_cast<std::int32_t>(8 * lane / block_size);
      blocks[1][lane] = static_cast<std::int32_t>((lane % 4 * 128 + lane / 4 * 32) / block_size);
    }
    block_of = _mm512_load_si512(blocks[0]);
    wide_block_of = _mm512_load_si512(blocks[1]);
  }
};

inline __attribute__((always_inline)) __m512 scales_of(float const* scales, std::int64_t blocks, __m512i block_of) {
  auto const some = static_cast<__mmask16>((1u << std::min<std::int64_t>(blocks, 16)) - 1);
  return _mm512_permutexvar_ps(block_of, _mm512_maskz_loadu_ps(some, scales));
}

// Multiplies kM rows of inputs by kN rows of weights; a sum is taken in the same order whatever the size of the tile.
template <int kBits, int kM, int kN>
inline __attribute__((always_inline)) void tile(RoundedInputs const* x, IntegerWeights const& weights, std::int64_t n,
                                                LaneScales const& lanes, float* y, std::int64_t y_stride) {
  static_assert(kN == 1 || kN == 4, "as sums_of takes them");
  std::int64_t const groups = weights.groups(), row_bytes = weights.row_bytes(), wide = weights.wide_groups();
  std::uint8_t const* const integers = weights.integers + n * row_bytes;
  float const* const scales = weights.scales + n * weights.blocks;
  __m512 sums[kN][kM];
#pragma GCC unroll 4
  for (int row = 0; row < kN; ++row) {
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) sums[row][m] = _mm512_setzero_ps();
  }
  for (std::int64_t group = 0; kBits == 4 && group < wide; ++group) {
    std::int64_t const offset = 256 * group, block = kWide * group / weights.block_size;
#pragma GCC unroll 4
    for (int row = 0; row < kN; ++row) {
      for (int line = 0; line < 256; line += 64) {
        __builtin_prefetch(integers + kN * offset + 256 * row + line + kAhead);
      }
      __m512i first[4], second[4];
      wide_integers_of(integers + row * row_bytes + offset, first, second);
      __m512 const scale =
          scales_of(scales + row * weights.blocks + block, weights.blocks - block, lanes.wide_block_of);
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) {
        auto const& inputs = reinterpret_cast<WideInputs const&>(x[m * groups + 4 * group]);
        __m512i dot = _mm512_load_si512(inputs.start);
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part) {
          dot = _mm512_dpbusd_epi32(dot, first[part], _mm512_load_si512(inputs.first[part]));
          dot = _mm512_dpbusd_epi32(dot, second[part], _mm512_load_si512(inputs.second[part]));
        }
        __m512 const both_scales = _mm512_mul_ps(scale, _mm512_load_ps(inputs.scales));
        sums[row][m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), both_scales, sums[row][m]);
      }
    }
  }
  for (std::int64_t group = kBits == 4 ? 4 * wide : 0; group < groups; ++group) {
    std::int64_t const offset = 16 * kBits * group, block = 128 * group / weights.block_size;
    __builtin_prefetch(scales + 16 * group + kAhead / 4);
#pragma GCC unroll 4
    for (int row = 0; row < kN; ++row) {
      for (int line = 0; line < 16 * kBits; line += 64) {
        __builtin_prefetch(integers + kN * offset + 16 * kBits * row + line + kAhead);
      }
      __m512i first, second;
      integers_of<kBits>(integers + row * row_bytes + offset, row_bytes - offset, first, second);
      __m512 const scale = scales_of(scales + row * weights.blocks + block, weights.blocks - block, lanes.block_of);
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) {
        RoundedInputs const& inputs = x[m * groups + group];
        __m512i dot = _mm512_dpbusd_epi32(_mm512_load_si512(inputs.start), first, _mm512_load_si512(inputs.first));
        dot = _mm512_dpbusd_epi32(dot, second, _mm512_load_si512(inputs.second));
        __m512 const both_scales = _mm512_mul_ps(scale, _mm512_load_ps(inputs.scales));
        sums[row][m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), both_scales, sums[row][m]);
      }
    }
  }
  // Four sums at a time: those of four rows of weights, or of inputs.
  auto const at = [&](int m, int i) { return (Floats)(kN == 4 ? sums[i % kN][m] : sums[0][std::min(m + i, kM - 1)]); };
#pragma GCC unroll 8
  for (int m = 0; m < kM; m += 4 / kN) {
    Quad const total = sums_of(at(m, 0), at(m, 1), at(m, 2), at(m, 3));
    if constexpr (kN == 4) {
      std::memcpy(y + m * y_stride, &total, sizeof total);
    } else {
      for (int i = 0; i < std::min(4, kM - m); ++i) y[(m + i) * y_stride] = total[i];
    }
  }
}

// Multiplies `count` rows of inputs, of kM at most, by rows of weights.
template <int kBits, int kM>
void rows(std::int64_t count, RoundedInputs const* x, IntegerWeights const& weights, std::int64_t n,
          std::int64_t n_size, float* y, std::int64_t y_stride) {
  if constexpr (kM > 1) {
    if (count < kM) return rows<kBits, kM - 1>(count, x, weights, n, n_size, y, y_stride);
  }
  LaneScales const lanes(weights.block_size);
  std::int64_t const end = n + n_size;
  // One row of inputs takes one row of 8-bit weights at a time: memory is the bound, and is read best from end to end.
  constexpr bool kSeveral = kM <= 4 && (kM > 1 || kBits == 4);  // for more there are no registers
  for (; kSeveral && n + 4 <= end; n += 4, y += 4) tile<kBits, kM, 4>(x, weights, n, lanes, y, y_stride);
  for (; n < end; ++n, ++y) tile<kBits, kM, 1>(x, weights, n, lanes, y, y_stride);
}

template <int kBits>
void multiply(RoundedInputs const* x, std::int64_t m_size, IntegerWeights const& weights, std::int64_t n,
              std::int64_t n_size, float* y, std::int64_t y_stride) {
  constexpr int kRows = kBits == 4 ? 8 : 4;
  for (std::int64_t m = 0; m < m_size;) {  // rows are divided evenly, so that no tile is small
    std::int64_t const left = m_size - m, tiles = (left + kRows - 1) / kRows, count = (left + tiles - 1) / tiles;
    rows<kBits, kRows>(count, x + m * weights.groups(), weights, n, n_size, y + m * y_stride, y_stride);
    m += count;
  }
}

#include "integer_panels.inc"

}  // namespace

bool integers_supported() {
  return cpu().avx512_vnni;
}

void round_row(float const* x, std::int64_t k_size, IntegerWeights const& weights, RoundedInputs* row) {
  std::int64_t const segment = std::min<std::int64_t>(weights.block_size, 128), padded = 128 * weights.groups();
  for (std::int64_t k = 0; k < padded; k += weights.block_size) {
    __m512 largest = _mm512_setzero_ps();
    std::int64_t const end = std::min(k + weights.block_size, k_size);
    for (std::int64_t i = k; i < end; i += 16) {
      auto const mask = static_cast<__mmask16>(end - i >= 16 ? 0xffff : (1 << (end - i)) - 1);
      largest = _mm512_max_ps(largest, _mm512_abs_ps(_mm512_maskz_loadu_ps(mask, x + i)));
    }
    float const most = _mm512_reduce_max_ps(largest);
    float const inverse = most > 0 ? 127.0f / most : 0.0f;
    std::int64_t i = k;
    for (; i < std::min(k + weights.block_size, kWide * weights.wide_groups()); i += 16) {
      auto const mask = static_cast<__mmask16>(i + 16 <= k_size ? 0xffff : i < k_size ? (1 << (k_size - i)) - 1 : 0);
      round_wide(_mm512_maskz_loadu_ps(mask, x + i), inverse, most / 127.0f, i % kWide,
                 reinterpret_cast<WideInputs&>(row[i / kWide * 4]));
    }
    for (; i < std::min(k + weights.block_size, padded); i += segment) {
      round_segment(x + i, k_size - i, segment / 16, inverse, most / 127.0f, i % 128, weights.bits, row[i / 128]);
    }
  }
}

void multiply_integers(RoundedInputs const* x, std::int64_t m_size, IntegerWeights const& weights, std::int64_t n,
                       std::int64_t n_size, float* y, std::int64_t y_stride) {
  bool const four = weights.bits == 4;
  std::int64_t done = 0;
  if (m_size >= kManyRows) {
    done = (four ? multiply_panels<4> : multiply_panels<8>)(x, m_size, weights, n, n_size, y, y_stride);
  }
  (four ? multiply<4> : multiply<8>)(x, m_size, weights, n + done, n_size - done, y + done, y_stride);
}

TIDE_END_TARGET

}  // namespace tide_ops

#else

namespace tide_ops {

bool integers_supported() { return false; }
void round_row(float const*, std::int64_t, IntegerWeights const&, RoundedInputs*) {}
void multiply_integers(RoundedInputs const*, std::int64_t, IntegerWeights const&, std::int64_t, std::int64_t, float*,
                       std::int64_t) {}

}  // namespace tide_ops

#endif

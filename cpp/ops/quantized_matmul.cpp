#include "quantized_matmul.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of GCC 12's own header
#endif
#include <immintrin.h>

#include "targets.h"

namespace tide_ops {
namespace {

TIDE_BEGIN_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma")

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

// Multiplies kM rows of inputs by kN rows of weights; a sum is taken in the same order whatever the size of the tile.
template <int kBits, int kM, int kN>
inline __attribute__((always_inline)) void tile(RoundedInputs const* x, IntegerWeights const& weights, std::int64_t n,
                                                __m512i block_of, float* y, std::int64_t y_stride) {
  static_assert(kN == 1 || kN == 4, "as sums_of takes them");
  std::int64_t const groups = weights.groups(), row_bytes = weights.row_bytes();
  std::uint8_t const* const integers = weights.integers + n * row_bytes;
  float const* const scales = weights.scales + n * weights.blocks;
  __m512 sums[kN][kM];
#pragma GCC unroll 4
  for (int row = 0; row < kN; ++row) {
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) sums[row][m] = _mm512_setzero_ps();
  }
  for (std::int64_t group = 0; group < groups; ++group) {
    std::int64_t const offset = 16 * kBits * group, block = 128 * group / weights.block_size;
    std::int64_t const blocks = std::min<std::int64_t>(weights.blocks - block, 16);
    auto const some = static_cast<__mmask16>((1u << blocks) - 1);
    if (kN > 1) __builtin_prefetch(scales + 16 * group + kAhead / 4);
#pragma GCC unroll 4
    for (int row = 0; row < kN; ++row) {
      for (int line = 0; kN > 1 && line < 16 * kBits; line += 64) {
        __builtin_prefetch(integers + kN * offset + 16 * kBits * row + line + kAhead);
      }
      __m512i first, second;
      integers_of<kBits>(integers + row * row_bytes + offset, row_bytes - offset, first, second);
      __m512 const scale =
          _mm512_permutexvar_ps(block_of, _mm512_maskz_loadu_ps(some, scales + row * weights.blocks + block));
#pragma GCC unroll 4
      for (int m = 0; m < kM; ++m) {
        RoundedInputs const& inputs = x[m * groups + group];
        __m512i dot = _mm512_dpbusd_epi32(_mm512_load_si512(inputs.start), first, _mm512_load_si512(inputs.first));
        dot = _mm512_dpbusd_epi32(dot, second, _mm512_load_si512(inputs.second));
        __m512 const both_scales = _mm512_mul_ps(scale, _mm512_load_ps(inputs.scales));
        sums[row][m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), both_scales, sums[row][m]);
      }
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < kM; ++m) {
    Quad const total =
        sums_of((Floats)sums[0][m], (Floats)sums[1 % kN][m], (Floats)sums[2 % kN][m], (Floats)sums[3 % kN][m]);
    std::memcpy(y + m * y_stride, &total, kN * sizeof(float));
  }
}

template <int kBits, int kM>
void rows(RoundedInputs const* x, IntegerWeights const& weights, std::int64_t n, std::int64_t n_size, float* y,
          std::int64_t y_stride) {
  alignas(64) std::int32_t block_of_lane[16];
  for (int lane = 0; lane < 16; ++lane) block_of_lane[lane] = static_cast<std::int32_t>(8 * lane / weights.block_size);
  __m512i const block_of = _mm512_load_si512(block_of_lane);
  std::int64_t const end = n + n_size;
  // One row of inputs takes one row of 8-bit weights at a time: memory is the bound, and is read best from end to end.
  for (; (kM > 1 || kBits == 4) && n + 4 <= end; n += 4, y += 4) {
    tile<kBits, kM, 4>(x, weights, n, block_of, y, y_stride);
  }
  for (; n < end; ++n, ++y) tile<kBits, kM, 1>(x, weights, n, block_of, y, y_stride);
}

template <int kBits>
void multiply(RoundedInputs const* x, std::int64_t m_size, IntegerWeights const& weights, std::int64_t n,
              std::int64_t n_size, float* y, std::int64_t y_stride) {
  for (std::int64_t m = 0; m < m_size;) {  // rows are divided evenly, so that no tile is small
    std::int64_t const left = m_size - m, tiles = (left + 3) / 4, count = (left + tiles - 1) / tiles;
    auto const run = count == 1   ? rows<kBits, 1>
                     : count == 2 ? rows<kBits, 2>
                     : count == 3 ? rows<kBits, 3>
                                  : rows<kBits, 4>;
    run(x + m * weights.groups(), weights, n, n_size, y + m * y_stride, y_stride);
    m += count;
  }
}

}  // namespace

bool integers_supported() {
  return cpu_has_avx512() && __builtin_cpu_supports("avx512vnni");
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
    for (std::int64_t i = k; i < std::min(k + weights.block_size, padded); i += segment) {
      round_segment(x + i, k_size - i, segment / 16, inverse, most / 127.0f, i % 128, weights.bits, row[i / 128]);
    }
  }
}

void multiply_integers(RoundedInputs const* x, std::int64_t m_size, IntegerWeights const& weights, std::int64_t n,
                       std::int64_t n_size, float* y, std::int64_t y_stride) {
  (weights.bits == 4 ? multiply<4> : multiply<8>)(x, m_size, weights, n, n_size, y + n, y_stride);
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

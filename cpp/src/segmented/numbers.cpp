#include "segmented/numbers.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace tide {
namespace {

float from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

constexpr std::uint32_t kHalfBias = 112;          // of the exponents of float32 and float16
constexpr float kSmallestHalf = 0x1p-24F;         // above zero
constexpr float kSmallestNormal = 0x1p-14F;       // of float16
constexpr std::uint32_t kInfiniteHalf = 0x7C00U;  // as bits

float from_half(std::uint16_t half) {
  std::uint32_t const sign = (half & 0x8000U) << 16U, rest = half & 0x7FFFU;
  if (rest >= kInfiniteHalf) return from_bits(sign | 0x7F800000U | (rest & 0x3FFU) << 13U);
  if (rest >= 0x400U) return from_bits(sign | ((rest << 13U) + (kHalfBias << 23U)));
  float const small = static_cast<float>(rest) * kSmallestHalf;
  return sign == 0 ? small : -small;
}

std::uint16_t to_half(float value) {
  std::uint32_t const bits = bits_of(value), sign = bits >> 16U & 0x8000U, rest = bits & 0x7FFFFFFFU;
  if (rest > 0x7F800000U) return static_cast<std::uint16_t>(sign | 0x7E00U);  // NaN
  if (std::fabs(value) < kSmallestNormal) {
    return static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(std::nearbyint(std::fabs(value) / kSmallestHalf)));
  }
  std::uint32_t const rounded = (rest + 0xFFFU + (rest >> 13U & 1U)) >> 13U;
  std::uint32_t const half = std::min(rounded - (kHalfBias << 10U), kInfiniteHalf);
  return static_cast<std::uint16_t>(sign | half);
}

float from_bfloat16(std::uint16_t number) { return from_bits(static_cast<std::uint32_t>(number) << 16U); }

std::uint16_t to_bfloat16(float value) {
  std::uint32_t const bits = bits_of(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<std::uint16_t>(bits >> 16U | 0x40U);  // NaN
  return static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16U & 1U)) >> 16U);
}

}  // namespace

void widen(std::string const& dtype, std::byte const* source, std::size_t count, float* target) {
  if (dtype == "float32") {
    std::memcpy(target, source, count * sizeof(float));
    return;
  }
  auto* const convert = dtype == "float16" ? &from_half : &from_bfloat16;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint16_t number;
    std::memcpy(&number, source + i * sizeof number, sizeof number);  // a file may have it at any byte
    target[i] = convert(number);
  }
}

void narrow(std::string const& dtype, float const* source, std::size_t count, std::byte* target) {
  if (dtype == "float32") {
    std::memcpy(target, source, count * sizeof(float));
    return;
  }
  auto* const convert = dtype == "float16" ? &to_half : &to_bfloat16;
  std::transform(source, source + count, reinterpret_cast<std::uint16_t*>(target), convert);
}

}  // namespace tide

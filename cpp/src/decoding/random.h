// Generates the random numbers of sampling: Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
// 1, 2, 3", SC 2011). A number depends only on the seed, the position in the sequence and the token, so drafts share the noise
// of the verifying run, and C++, C and Python draw the same numbers.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "../../ops/logits.h"

namespace tide {

using PhiloxBlock = std::array<std::uint32_t, 4>;

// The four words of a counter.
inline PhiloxBlock philox(PhiloxBlock counter, std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    std::uint64_t const first = std::uint64_t{0xD2511F53} * counter[0], second = std::uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<std::uint32_t>(second >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(second),
               static_cast<std::uint32_t>(first >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(first)};
    key = {key[0] + 0x9E3779B9, key[1] + 0xBB67AE85};
  }
  return counter;
}

// Gumbel noise of the tokens at one position of a sequence: argmax(logit / T + noise) is a draw from softmax(logits / T).
class GumbelNoise {
 public:
  static constexpr double kLog2 = 0.69314718055994530942;
  static constexpr double kMost = 33 * kLog2;  // of a word of 32 bits

  GumbelNoise(std::uint64_t seed, std::uint64_t position)
      : key_{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)},
        position_{static_cast<std::uint32_t>(position), static_cast<std::uint32_t>(position >> 32)} {}

  // Each counter has the words of four tokens.
  std::uint32_t word(std::int64_t token) const {
    PhiloxBlock const counter{static_cast<std::uint32_t>(token / 4), position_[0], position_[1], 0};
    return philox(counter, key_)[static_cast<std::size_t>(token % 4)];
  }

  // Of the 64 tokens whose counters begin with `first`, a bit for each whose noise may be `least` or more: with a word of
  // 2^32 (1 - e^-least) or more, as noise is at most -log(1 - u).
  std::uint64_t likely(std::uint32_t first, double least) const {
    static tide_ops::LogitsKernel const& kernel = *tide_ops::logits_kernel();
    double const word = -std::expm1(-std::max(least, 0.0)) * (1 - 1e-9) * 0x1p32 - 2;
    return kernel.words(key_, position_, first, word > 0 ? static_cast<std::uint32_t>(word) : 0);
  }

  // -log(-log(u)) of u = (word + 1/2) / 2^32.
  static double of(std::uint32_t word) { return -std::log(-std::log((static_cast<double>(word) + 0.5) * 0x1p-32)); }

  // No less than `of`: k leading ones of a word say that 1 - u is at least 2^-(k + 1), and noise is at most -log(1 - u).
  static double bound(std::uint32_t word) {
    std::uint32_t const rest = ~word;
    return (rest == 0 ? 33 : __builtin_clz(rest) + 1) * kLog2;
  }

 private:
  std::array<std::uint32_t, 2> key_, position_;
};

}  // namespace tide

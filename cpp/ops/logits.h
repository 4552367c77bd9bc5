// Scans of a row of logits, from which few tokens matter. Chosen for the CPU it runs on.
#pragma once

#include <array>
#include <cstdint>

namespace tide_ops {

constexpr std::int64_t kLogitsBlock = 64;  // tokens that are passed over at once

struct LogitsKernel {
  // Writes the largest logit of each block, `count` of them in all; false: one is NaN.
  bool (*maxima)(float const* logits, std::int64_t count, float* largest);
  // The sum of e^((logit - most) / T), `most` being the largest logit.
  double (*sum)(float const* logits, std::int64_t count, float most, float temperature);
  // Of the words of Philox4x32-10 of a block of tokens, four for each of 16 counters from `first` on, those that are
  // `least` or more: a bit each.
  std::uint64_t (*words)(std::array<std::uint32_t, 2> const& key, std::array<std::uint32_t, 2> const& position,
                         std::uint32_t first, std::uint32_t least);
};

// The kernel of an instruction set; without a name, the best for this CPU. Null if there is none, or not for this CPU.
LogitsKernel const* logits_kernel(char const* name = nullptr);

}  // namespace tide_ops

// What tests call of the operators' kernels, by the name of an instruction set; in place of cpp/ops/used_kernels.cpp.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "half_matmul.h"
#include "logits.h"
#include "norm.h"
#include "quantized_matmul.h"
#include "recurrence.h"

#define TIDE_EXPORTED extern "C" __attribute__((visibility("default")))

// The kernel of an instruction set: y [M, N] = x [M, K] times the transpose of weights [N, K], bfloat16 (format 0) or
// float16 (1). 0, or 1 if this CPU has no such instructions.
TIDE_EXPORTED int half_matmul(char const* instruction_set, int format, float const* x,
                                       std::uint16_t const* weights, std::int64_t m_size, std::int64_t n_size,
                                       std::int64_t k_size, float* y) {
  tide_ops::HalfKernel const* const kernel =
      tide_ops::half_kernel(static_cast<tide_ops::HalfFormat>(format), instruction_set);
  if (kernel == nullptr) return 1;
  std::int64_t const stride = tide_ops::SplitRows::stride(k_size);
  std::vector<float> split(static_cast<std::size_t>(m_size * stride));
  for (std::int64_t m = 0; m < m_size; ++m) kernel->split_row(x + m * k_size, k_size, split.data() + m * stride);
  kernel->multiply({split.data(), m_size, k_size}, weights, n_size, y, n_size);
  return 0;
}

// The kernel of an instruction set: y [M, N] = x [M, K] times the transpose of integers of 4 bits (format 0), of 8 (1) or MXFP4
// (2), [N, K / block_size, bytes of a block] with scales [N, K / block_size]. 0, or 1 if this CPU has no such instructions.
TIDE_EXPORTED int integer_matmul(char const* instruction_set, int format, float const* x,
                                          std::uint8_t const* integers, void const* scales, std::int64_t m_size,
                                          std::int64_t n_size, std::int64_t k_size, std::int64_t block_size, float* y) {
  tide_ops::IntegerKernel const* const kernel = tide_ops::integer_kernel(instruction_set);
  if (kernel == nullptr) return 1;
  auto const of = static_cast<tide_ops::IntegerFormat>(format);
  tide_ops::IntegerWeights const weights{integers, scales, 1, n_size, k_size / block_size, block_size, of, false};
  tide_ops::PackedWeights packed(weights);
  for (std::int64_t panel = 0; panel < packed.panels(); ++panel) packed.fill(weights, panel);
  tide_ops::RoundedInputs inputs{nullptr, weights.blocks, block_size, of};
  std::vector<char> rows(static_cast<std::size_t>(m_size * inputs.stride()));
  inputs.rows = rows.data();
  for (std::int64_t m = 0; m < m_size; ++m) kernel->round(inputs, x + m * k_size, k_size, m, 0);
  kernel->multiply(inputs, m_size, packed, 0, n_size, {y, nullptr}, n_size);
  return 0;
}

// A function of the kernel of an instruction set (elementwise.h), by its number. 0, or 1 if this CPU has no such
// instructions.
TIDE_EXPORTED int elementwise(char const* instruction_set, int function, float const* x, std::int64_t count,
                                       float* y) {
  tide_ops::ElementwiseKernel const* const kernel = tide_ops::elementwise_kernel(instruction_set);
  if (kernel == nullptr) return 1;
  decltype(kernel->gate) const functions[] = {kernel->gate, kernel->sigmoid, kernel->exponential, kernel->gelu,
                                              kernel->tanh_gelu};
  functions[function](x, count, y);
  return 0;
}

// The kernel of an instruction set, with epsilon 1e-5: the norm of x + skip (a layer norm, or by the root of the mean square)
// and their sum, all of `size` floats; bias may be null. 0, or 1 if this CPU has no such instructions.
TIDE_EXPORTED int norm(char const* instruction_set, int layer, std::int64_t size, float const* x,
                                float const* skip, float const* scale, float const* bias, float* sum, float* y) {
  tide_ops::NormKernel const* const kernel = tide_ops::norm_kernel(instruction_set);
  if (kernel == nullptr) return 1;
  (layer != 0 ? kernel->layer : kernel->rms)({x, skip, nullptr, scale, bias}, size, 1e-5f, sum, y);
  return 0;
}

// The kernel of an instruction set (logits.h): the largest logit of each block, the sum of all weights, and which of the words
// of a block are `least` or more. 0; 1 if this CPU has no such instructions; 2 if a logit is NaN.
TIDE_EXPORTED int logits(char const* instruction_set, float const* logits, std::int64_t count,
                                  float temperature, float* maxima, double* sum, std::uint32_t const* key,
                                  std::uint32_t const* position, std::uint32_t first, std::uint32_t least,
                                  std::uint64_t* words) {
  tide_ops::LogitsKernel const* const kernel = tide_ops::logits_kernel(instruction_set);
  if (kernel == nullptr) return 1;
  if (!kernel->maxima(logits, count, maxima)) return 2;
  *sum = kernel->sum(logits, count, *std::max_element(logits, logits + count), temperature);
  *words = kernel->words({key[0], key[1]}, {position[0], position[1]}, first, least);
  return 0;
}

namespace tide_ops {
namespace {

std::atomic<AttentionKernel const*> chosen_attention{nullptr};
std::atomic<RecurrenceKernel const*> chosen_recurrence{nullptr};

}  // namespace

AttentionKernel const& used_attention_kernel() {
  AttentionKernel const* const chosen = chosen_attention;
  return chosen == nullptr ? *attention_kernel() : *chosen;
}

RecurrenceKernel const& used_recurrence_kernel() {
  RecurrenceKernel const* const chosen = chosen_recurrence;
  return chosen == nullptr ? *recurrence_kernel() : *chosen;
}

}  // namespace tide_ops

// Makes all sessions use the attention of an instruction set from now on; null: that of this CPU. 0, or 1 if this CPU has no
// such instructions.
TIDE_EXPORTED int use_attention(char const* instruction_set) {
  tide_ops::chosen_attention = tide_ops::attention_kernel(instruction_set);
  return tide_ops::chosen_attention == nullptr ? 1 : 0;
}

// The same for layers with a recurrent state.
TIDE_EXPORTED int use_recurrence(char const* instruction_set) {
  tide_ops::chosen_recurrence = tide_ops::recurrence_kernel(instruction_set);
  return tide_ops::chosen_recurrence == nullptr ? 1 : 0;
}

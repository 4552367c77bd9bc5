// Layers with a recurrent state: convolutions of channels, and states of heads that every token changes. Chosen for the
// CPU it runs on.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tide_ops {

// How many numbers a token's decay of a head has: one, one for each row of the state, or one for each of its numbers.
enum class Decay { kOne, kRows, kAll };

// A head's state [rows, columns].
struct HeadShape {
  std::int64_t rows, columns;
  Decay decay;

  std::int64_t decays() const { return decay == Decay::kOne ? 1 : decay == Decay::kRows ? rows : rows * columns; }
};

// A token in a head: state = decay * state + key * delta; the output is query * state, and delta is
// value or, with a beta, beta * (value - key * decay * state).
struct HeadToken {
  float const *decay, *key;           // [decays], [rows]
  float* delta;                       // [columns], known where there is no output
  float* output;                      // [columns], or null
  float const *query, *value, *beta;  // [rows], [columns], [1] or null; not read where delta is known
};

// What tokens do to a head's state.
struct HeadRun {
  HeadShape shape;
  HeadToken const* tokens;
  std::int64_t count, settled;  // the state becomes that after so many of them
  float* state;

  std::int64_t scratch_floats() const { return shape.rows * std::min(shape.columns + kMaxLanes, kStripFloats); }

  static constexpr std::int64_t kMaxLanes = 16, kStripFloats = 64;
};

// A token's delta, its output and the state after it have the same bits whatever is computed at once.
struct RecurrenceKernel {
  void (*run)(HeadRun const& run, float* scratch);  // scratch: of `scratch_floats`
  // The convolution of channels begin .. end - 1 at one token: rows are its last `taps` inputs, null before the first;
  // weights [taps, channels]; bias may be null.
  void (*convolve)(float const* const* rows, float const* weights, float const* bias, std::int64_t taps,
                   std::int64_t channels, std::int64_t begin, std::int64_t end, bool silu, float* y);
};

// The kernel of an instruction set; without a name, the best for this CPU. Null if there is none, or not for this CPU.
RecurrenceKernel const* recurrence_kernel(char const* name = nullptr);

// That which the operators use: the best for this CPU.
RecurrenceKernel const& used_recurrence_kernel();

}  // namespace tide_ops

// Attention of the new tokens of one sequence to its K/V cache, in float32. Each token's keys of a head are a row: of
// head_dim floats, or of head_dim int8 numbers and their scale, a float, which are widened as they are read. Values
// likewise. Chosen for the CPU it runs on.
#pragma once

#include <cstdint>

namespace tide_ops {

constexpr std::int64_t kScaleBytes = 4;  // after the numbers of a row

struct Attention {
  std::int64_t heads, kv_heads, head_dim;
  std::int64_t width;          // head_dim rounded up to 16: of rows of floats here
  std::int64_t tokens, total;  // new ones, and all of the sequence with them
  std::int64_t capacity;       // of the buffers, in tokens
  std::int64_t window;         // tokens that each attends to at most, itself one of them; 0: all before it
  float softcap;               // 0: none
  bool int8;                   // or floats
  float const* queries;        // [kv_heads, tokens, heads / kv_heads, width], rotated and scaled; zero after head_dim
  char const *keys, *values;  // rows [kv_heads, capacity]
  float const* bias;          // [heads, tokens, .. total], added to scores; null: none
  std::int64_t bias_head_stride, bias_token_stride;
  float const* sinks;  // [heads], scores of a key without a value; null: none
  float* output;       // [tokens, heads, head_dim]

  std::int64_t row_bytes() const { return int8 ? head_dim + kScaleBytes : head_dim * 4; }
};

// Queries of one head of keys: `count` rows from `first`, of heads / kv_heads for each token.
struct QueryRows {
  std::int64_t kv_head, first, count;
};

constexpr std::int64_t kChunk = 256;  // keys of one partial result; it begins at a multiple of this

struct AttentionKernel {
  // Writes a row of int8: the scale is the largest magnitude / 127.
  void (*store_int8)(float const* x, std::int64_t head_dim, char* row);
  // The queries' attention to one chunk of keys, `partial_floats`. scratch: of `scratch_floats`.
  void (*attend)(Attention const& attention, QueryRows const& rows, std::int64_t chunk, float* partial,
                 float* scratch);
  // Writes the output for these queries, from the partial results of `chunks` chunks in order, `stride` floats from one
  // to the next. An output is the same however many tokens are computed at once.
  void (*merge)(Attention const& attention, QueryRows const& rows, float const* partials, std::int64_t chunks,
                std::int64_t stride);
};

std::int64_t partial_floats(Attention const& attention, std::int64_t rows);
std::int64_t scratch_floats(Attention const& attention, std::int64_t rows);

// The kernel of an instruction set; without a name, the best for this CPU. Null if there is none, or not for this CPU.
AttentionKernel const* attention_kernel(char const* name = nullptr);

}  // namespace tide_ops

// Attention of new tokens to the K/V cache of their sequences, in float32. Keys and values are in pages: of each head a
// page has some tokens' rows. A row is head_dim floats, or head_dim int8 numbers and their scale, a float; these are
// widened as they are read. Chosen for the CPU it runs on.
#pragma once

#include <cstdint>

namespace tide_ops {

constexpr std::int64_t kScaleBytes = 4;  // after the numbers of a row
constexpr std::int64_t kChunk = 256;     // keys of one partial result; it begins at a multiple of this

// What is the same for all queries.
struct Attention {
  std::int64_t heads, kv_heads, head_dim;
  std::int64_t width;          // head_dim rounded up to 16: of rows of floats here
  std::int64_t page_tokens;    // a multiple of 4 that divides kChunk, or a multiple of kChunk
  std::int64_t window;         // tokens that each attends to at most, itself one of them; 0: all before it
  float softcap;               // 0: none
  bool int8;                   // or floats
  char const *keys, *values;   // pages of rows [kv_heads, page_tokens]
  float const* bias;           // [heads, bias_stride] by position, added to scores less that of the query; null: none
  std::int64_t bias_stride;
  float const* sinks;  // [heads], scores of a key without a value; null: none
  std::int64_t extent;  // distances from a query to a key for which it has a bias of its own; 0: none

  std::int64_t group() const { return heads / kv_heads; }
  std::int64_t row_bytes() const { return int8 ? head_dim + kScaleBytes : head_dim * 4; }
};

// Queries of one head of keys, of consecutive tokens of a sequence: `group` of each.
struct Queries {
  std::int32_t const* pages;  // of the sequence
  std::int64_t kv_head, position, count;  // position: of the first token
  float const* rows;                      // [count, width], rotated and scaled; zero after head_dim
  float* softmax;                         // [count, 2], largest score and sum, between calls of `merge`
  float const* distance_bias;             // of the first token, [.., heads, extent], added to scores
  float* output;                          // of the first token, [.., heads, head_dim]
};

// Consecutive chunks of keys.
struct Chunks {
  std::int64_t first, count;
  bool begin, end;  // whether these are the first that the queries attend to, and the last
};

// A query's output does not depend on which queries are computed with it.
struct AttentionKernel {
  // Writes a row of int8: the scale is the largest magnitude / 127.
  void (*store_int8)(float const* x, std::int64_t head_dim, char* row);
  // The queries' attention to one chunk of keys, `partial_floats`. scratch: of `scratch_floats`.
  void (*attend)(Attention const& attention, Queries const& queries, std::int64_t chunk, float* partial,
                 float* scratch);
  // Adds the partial results of chunks to the output, `stride` floats from one to the next.
  void (*merge)(Attention const& attention, Queries const& queries, Chunks const& chunks, float const* partials,
                std::int64_t stride);
};

std::int64_t partial_floats(Attention const& attention, std::int64_t queries);
std::int64_t scratch_floats(Attention const& attention, std::int64_t queries);

// The kernel of an instruction set; without a name, the best for this CPU. Null if there is none, or not for this CPU.
AttentionKernel const* attention_kernel(char const* name = nullptr);

// That which the operators use: the best for this CPU.
AttentionKernel const& used_attention_kernel();

}  // namespace tide_ops

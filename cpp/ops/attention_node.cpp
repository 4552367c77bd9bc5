// TidePagedAttention and TideInt8PagedAttention: attention of new tokens of any number of sequences, one after another,
// to keys and values in pages that all sequences share: [pages, kv_heads, page_tokens, head_dim], and in int8
// [.., head_dim + 4] (see attention.h). New keys and values are stored before anything attends to them, so that a
// token's output does not depend on which tokens are computed at once. tide_export/lower/onnxruntime/paged_attention.py
// says the same in standard operators.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention.h"
#include "attention_run.h"
#include "nodes.h"

namespace tide_ops {
namespace {

enum Input {
  kQuery, kKey, kValue, kKeyPages, kValuePages, kPageTable, kLengths, kStarts, kCos, kSin, kBias, kSinks,
  kDistanceBias, kInputs
};

constexpr std::int64_t kPartTokens = 16;         // rotated and stored by one thread at a time
constexpr std::int64_t kFewNewFloats = 1 << 15;  // of new tokens; below, threads would cost more than they gain

class PagedAttention : public Node {
 public:
  PagedAttention(bool int8, Attributes const& attributes)
      : int8_(int8),
        interleaved_(attributes.integer("rotary_interleaved", 0) != 0),
        heads_(attributes.integer("num_heads", 0)),
        kv_heads_(attributes.integer("kv_num_heads", 0)),
        window_(attributes.integer("local_window_size", -1)),
        scale_(attributes.number("scale", 0)),
        softcap_(attributes.number("softcap", 0)) {}

  Status* add(Operands const& operands, Run& run) override;

 private:
  bool const int8_, interleaved_;
  std::int64_t const heads_, kv_heads_, window_;
  float const scale_, softcap_;
};

// Reads the sequences; `rows`: their new tokens.
Status* sequences_of(Tensor const* inputs, std::int64_t rows, Attention const& attention, Sequences& sequences) {
  Tensor const &table = inputs[kPageTable], &lengths = inputs[kLengths], &starts = inputs[kStarts];
  if (table.rank != 2 || lengths.rank != 1 || lengths.dims[0] != table.dims[0] ||
      (starts.data == nullptr ? table.dims[0] != 1 : starts.rank != 1 || starts.dims[0] != table.dims[0] + 1)) {
    return invalid("attention takes a page table [R, J], lengths [R] and starts [R + 1], which one sequence needs not");
  }
  sequences = {table.dims[0],
               table.dims[1],
               static_cast<std::int32_t const*>(table.data),
               static_cast<std::int64_t const*>(lengths.data),
               static_cast<std::int64_t const*>(starts.data),
               {0, rows}};
  std::int64_t const* const first = sequences.starts();
  if (first[0] != 0 || first[sequences.count] != rows || !std::is_sorted(first, first + sequences.count + 1)) {
    return invalid("attention: the sequences' starts do not ascend from 0 to the number of new tokens");
  }
  auto const pages = static_cast<std::uint64_t>(inputs[kKeyPages].dims[0]);
  for (std::int64_t i = 0; i < sequences.count; ++i) {
    std::int64_t const length = sequences.lengths[i];
    if (length < sequences.tokens(i)) return invalid("attention: a sequence is shorter than its new tokens");
    if (length > sequences.longest_table * attention.page_tokens) {
      return invalid("attention: a sequence is longer than its pages");
    }
    if (sequences.tokens(i) == 0) continue;
    std::int32_t const* const table_row = sequences.pages + i * sequences.longest_table;
    std::uint32_t largest = 0;  // a negative number is a large one
    for (std::int64_t page = 0; page < (length + attention.page_tokens - 1) / attention.page_tokens; ++page) {
      largest = std::max(largest, static_cast<std::uint32_t>(table_row[page]));
    }
    if (largest >= pages) return invalid("attention: a sequence has a page that is none");
  }
  return nullptr;
}

// The pages after the run: the memory of those before it where both are bound to it, else a copy.
Status* new_pages_of(Operands const& operands, std::size_t output, Tensor const& pages, std::int64_t size,
                     void** data) {
  TIDE_RETURN_IF_FAILED(operands.output(output, pages.dims, pages.rank, data));
  if (*data == nullptr) return invalid("attention has outputs for the pages that it writes");
  if (*data != pages.data) {
    std::int64_t bytes = size;
    for (std::size_t d = 0; d < pages.rank; ++d) bytes *= pages.dims[d];
    std::memcpy(*data, pages.data, static_cast<std::size_t>(bytes));
  }
  return nullptr;
}

bool is_table(Tensor const& table, std::int64_t rows, std::int64_t columns) {
  return table.rank == 2 && table.dims[0] >= rows && table.dims[1] == columns;
}

Status* PagedAttention::add(Operands const& operands, Run& run) {
  Tensor inputs[kInputs];
  for (std::size_t i = 0; i < kInputs; ++i) TIDE_RETURN_IF_FAILED(operands.input(i, inputs[i]));
  Tensor const &query = inputs[kQuery], &key = inputs[kKey], &value = inputs[kValue], &pages = inputs[kKeyPages];
  auto const like_query = [&](Tensor const& x) {
    return x.rank == 0 || (x.rank == 3 && x.dims[0] == 1 && x.dims[1] == query.dims[1]);
  };
  if (query.rank != 3 || query.dims[0] != 1 || !like_query(key) || !like_query(value) || key.rank != value.rank) {
    return invalid("attention takes queries [1, N, ..], and keys and values of the same tokens or neither");
  }
  if (pages.rank != 4 || inputs[kValuePages].rank != 4 ||
      !std::equal(pages.dims, pages.dims + 4, inputs[kValuePages].dims)) {
    return invalid("attention takes pages [P, kv_heads, T, head_dim (+ 4)], of keys and of values alike");
  }
  Attention a{};
  a.int8 = int8_;
  a.heads = heads_;
  a.kv_heads = kv_heads_;
  a.head_dim = pages.dims[3] - (a.int8 ? kScaleBytes : 0);
  a.width = (a.head_dim + 15) / 16 * 16;
  a.page_tokens = pages.dims[2];
  a.window = std::max<std::int64_t>(window_, 0);
  a.softcap = softcap_;
  if (a.page_tokens < 4 || a.page_tokens % 4 != 0 || (kChunk % a.page_tokens != 0 && a.page_tokens % kChunk != 0)) {
    return invalid("attention takes pages of 4, 8, 16, 32, 64 or 128 tokens, or of a multiple of 256");
  }
  bool const fits = a.kv_heads > 0 && a.heads > 0 && a.heads % a.kv_heads == 0 && a.head_dim > 0;
  std::int64_t const size = fits ? a.heads * a.head_dim : 0, kv_size = fits ? a.kv_heads * a.head_dim : 0;
  bool const packed = key.rank == 0 && query.dims[2] == size + 2 * kv_size;  // keys and values follow the queries
  if (!fits || pages.dims[1] != a.kv_heads || (!packed && query.dims[2] != size) ||
      (key.rank > 0 && (key.dims[2] != kv_size || value.dims[2] != kv_size)) ||
      (inputs[kSinks].rank > 0 && (inputs[kSinks].rank != 1 || inputs[kSinks].dims[0] != a.heads))) {
    return invalid("attention: the heads of queries, keys, values, pages and sinks do not fit each other");
  }
  std::int64_t const tokens = query.dims[1];
  Sequences sequences;
  TIDE_RETURN_IF_FAILED(sequences_of(inputs, tokens, a, sequences));
  std::int64_t longest = 0;
  for (std::int64_t i = 0; i < sequences.count; ++i) longest = std::max(longest, sequences.lengths[i]);
  Tensor const &cos = inputs[kCos], &sin = inputs[kSin], &bias = inputs[kBias];
  std::int64_t const half = cos.rank > 0 ? cos.dims[1] : 0;
  if ((cos.rank > 0 || sin.rank > 0) &&
      (2 * half > a.head_dim || !is_table(cos, longest, half) || !is_table(sin, longest, half))) {
    return invalid("attention: the tables of the rotation do not fit the heads or the longest sequence");
  }
  if (bias.rank > 0 && (bias.rank != 2 || bias.dims[0] != a.heads || bias.dims[1] < longest)) {
    return invalid("attention: the table of biases does not fit the heads or the longest sequence");
  }
  Tensor const& distance_bias = inputs[kDistanceBias];
  if (!like_query(distance_bias) || (distance_bias.rank > 0 && distance_bias.dims[2] % a.heads != 0)) {
    return invalid("attention: the biases by distance do not fit the new tokens or the heads");
  }

  bool const writes = packed || key.rank > 0;
  std::int64_t const shape[] = {1, tokens, size};
  void *result, *keys = pages.data, *values = inputs[kValuePages].data;
  TIDE_RETURN_IF_FAILED(operands.output(0, shape, 3, &result));
  if (writes) {
    TIDE_RETURN_IF_FAILED(new_pages_of(operands, 1, pages, a.int8 ? 1 : 4, &keys));
    TIDE_RETURN_IF_FAILED(new_pages_of(operands, 2, inputs[kValuePages], a.int8 ? 1 : 4, &values));
  }
  a.keys = static_cast<char const*>(keys);
  a.values = static_cast<char const*>(values);
  a.bias = static_cast<float const*>(bias.data);
  a.bias_stride = bias.dims[1];
  a.sinks = static_cast<float const*>(inputs[kSinks].data);
  a.extent = distance_bias.rank > 0 ? distance_bias.dims[2] / a.heads : 0;

  AttentionKernel const& kernel = used_attention_kernel();
  std::int64_t const rows = tokens * a.heads;
  float* const queries = run.scratch(rows * (a.width + 2), Run::kFirst);
  auto const queries_in = static_cast<float const*>(query.data);
  NewTokens const taken{kernel,
                        a,
                        sequences,
                        {static_cast<float const*>(cos.data), static_cast<float const*>(sin.data), half, interleaved_},
                        scale_ != 0 ? scale_ : 1 / std::sqrt(static_cast<float>(a.head_dim)),
                        queries_in,
                        packed ? queries_in + size : static_cast<float const*>(key.data),
                        packed ? queries_in + size + kv_size : static_cast<float const*>(value.data),
                        query.dims[2],
                        packed ? query.dims[2] : kv_size,
                        static_cast<char*>(keys),
                        static_cast<char*>(values),
                        queries};
  run.add((tokens + kPartTokens - 1) / kPartTokens, [taken, tokens](std::int64_t part) {
    taken.take(part * kPartTokens, std::min((part + 1) * kPartTokens, tokens));
  });
  if (tokens * (size + (writes ? 2 * kv_size : 0)) >= kFewNewFloats) run.needs_threads();

  Spans spans(a);
  float* const softmax = queries + rows * a.width;
  for (std::int64_t i = 0; i < sequences.count; ++i) {
    for (std::int64_t token = 0; token < sequences.tokens(i); token += kSpanTokens) {
      std::int64_t const count = std::min(kSpanTokens, sequences.tokens(i) - token);
      std::int64_t const row = sequences.starts()[i] + token;
      spans.add({sequences.pages + i * sequences.longest_table, 0, sequences.first_position(i) + token,
                 count * a.group(), queries + row * a.heads * a.width, softmax + 2 * row * a.heads,
                 static_cast<float const*>(distance_bias.data) + row * a.heads * a.extent,
                 static_cast<float*>(result) + row * size});
    }
  }
  std::move(spans).add_phases(run, kernel, run.scratch(spans.floats(), Run::kSecond));
  return nullptr;
}

}  // namespace

std::unique_ptr<Node> attention_node(bool int8, Attributes const& attributes) {
  return std::make_unique<PagedAttention>(int8, attributes);
}

}  // namespace tide_ops

// TidePagedAttention and TideInt8PagedAttention: attention of new tokens of any number of sequences, one after another,
// to keys and values in pages that all sequences share: [pages, kv_heads, page_tokens, head_dim], and in int8
// [.., head_dim + 4] (see attention.h). New keys and values are stored before anything attends to them, so that a
// token's output does not depend on which tokens are computed at once. tide_export/lower/onnxruntime/paged_attention.py
// says the same in standard operators.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "attention.h"
#include "attention_run.h"
#include "kernel.h"
#include "operators.h"

namespace tide_ops {
namespace {

enum Input {
  kQuery, kKey, kValue, kKeyPages, kValuePages, kPageTable, kLengths, kStarts, kCos, kSin, kBias, kSinks, kInputs
};

constexpr std::int64_t kKeptQueries = 1 << 18;    // more queries are not kept by the thread that rotated them
constexpr std::int64_t kPartTokens = 16;          // rotated and stored by one thread at a time
constexpr std::int64_t kFewNewFloats = 1 << 15;  // of new tokens; below, threads would cost more than they gain

std::atomic<AttentionKernel const*> chosen{nullptr};

struct Attributes {
  bool int8 = false;
  float scale = 0, softcap = 0;
  std::int64_t heads = 0, kv_heads = 0, window = -1, interleaved = 0;
};

template <typename T, typename Entry>
void read_attribute(Entry const& entry, void const* info, char const* name, T& value) {
  if (Status* const missing = entry(info, name, &value)) {
    api.ReleaseStatus(missing);
  }
}

Status* invalid(char const* message) { return api.CreateStatus(abi::kInvalidArgument, message); }

// Reads the sequences; `rows`: their new tokens. `whole`: memory for the starts of a single one.
Status* sequences_of(Tensor const* inputs, std::int64_t rows, Attention const& attention, std::int64_t* whole,
                     Sequences& sequences) {
  Tensor const &table = inputs[kPageTable], &lengths = inputs[kLengths], &starts = inputs[kStarts];
  if (table.rank != 2 || lengths.rank != 1 || lengths.dims[0] != table.dims[0] ||
      (starts.data == nullptr ? table.dims[0] != 1 : starts.rank != 1 || starts.dims[0] != table.dims[0] + 1)) {
    return invalid("attention takes a page table [R, J], lengths [R] and starts [R + 1], which one sequence needs not");
  }
  whole[0] = 0;
  whole[1] = rows;
  sequences = {table.dims[0], table.dims[1], static_cast<std::int32_t const*>(table.data),
               static_cast<std::int64_t const*>(lengths.data),
               starts.data == nullptr ? whole : static_cast<std::int64_t const*>(starts.data)};
  if (sequences.starts[0] != 0 || sequences.starts[sequences.count] != rows ||
      !std::is_sorted(sequences.starts, sequences.starts + sequences.count + 1)) {
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
    std::int32_t const* const first = sequences.pages + i * sequences.longest_table;
    std::uint32_t largest = 0;  // a negative number is a large one
    for (std::int64_t page = 0; page < (length + attention.page_tokens - 1) / attention.page_tokens; ++page) {
      largest = std::max(largest, static_cast<std::uint32_t>(first[page]));
    }
    if (largest >= pages) return invalid("attention: a sequence has a page that is none");
  }
  return nullptr;
}

// The pages after the run: the memory of those before it where both are bound to it, else a copy.
Status* new_pages_of(Context* context, std::size_t output, Tensor const& pages, std::int64_t size, void** data) {
  Value* value;
  TIDE_RETURN_IF_FAILED(api.KernelContext_GetOutput(context, output, pages.dims, pages.rank, &value));
  if (value == nullptr) return invalid("attention has outputs for the pages that it writes");
  TIDE_RETURN_IF_FAILED(api.GetTensorMutableData(value, data));
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

Status* compute_checked(Attributes const& attributes, Context* context) {
  Tensor inputs[kInputs];
  for (std::size_t i = 0; i < kInputs; ++i) TIDE_RETURN_IF_FAILED(input_of(context, i, inputs[i]));
  Tensor const &query = inputs[kQuery], &key = inputs[kKey], &value = inputs[kValue], &pages = inputs[kKeyPages];
  Tensor const& first = query.rank > 0 ? query : key;
  auto const like_first = [&](Tensor const& x) {
    return x.rank == 0 || (x.rank == 3 && x.dims[0] == 1 && x.dims[1] == first.dims[1]);
  };
  if (first.rank != 3 || !like_first(query) || !like_first(key) || !like_first(value) || key.rank != value.rank) {
    return invalid("attention takes queries [1, N, ..], keys and values of the same tokens, or one of the two");
  }
  if (pages.rank != 4 || inputs[kValuePages].rank != 4 ||
      !std::equal(pages.dims, pages.dims + 4, inputs[kValuePages].dims)) {
    return invalid("attention takes pages [P, kv_heads, T, head_dim (+ 4)], of keys and of values alike");
  }
  Attention a{};
  a.int8 = attributes.int8;
  a.heads = attributes.heads;
  a.kv_heads = attributes.kv_heads;
  a.head_dim = pages.dims[3] - (a.int8 ? kScaleBytes : 0);
  a.width = (a.head_dim + 15) / 16 * 16;
  a.page_tokens = pages.dims[2];
  a.window = std::max<std::int64_t>(attributes.window, 0);
  a.softcap = attributes.softcap;
  if (a.page_tokens < 4 || a.page_tokens % 4 != 0 || (kChunk % a.page_tokens != 0 && a.page_tokens % kChunk != 0)) {
    return invalid("attention takes pages of 4, 8, 16, 32, 64 or 128 tokens, or of a multiple of 256");
  }
  bool const fits = a.kv_heads > 0 && a.heads > 0 && a.heads % a.kv_heads == 0 && a.head_dim > 0;
  std::int64_t const size = fits ? a.heads * a.head_dim : 0, kv_size = fits ? a.kv_heads * a.head_dim : 0;
  bool const packed = key.rank == 0 && query.dims[2] == size + 2 * kv_size;  // keys and values follow the queries
  if (!fits || pages.dims[1] != a.kv_heads || (query.rank > 0 && !packed && query.dims[2] != size) ||
      (key.rank > 0 && (key.dims[2] != kv_size || value.dims[2] != kv_size)) ||
      (inputs[kSinks].rank > 0 && (inputs[kSinks].rank != 1 || inputs[kSinks].dims[0] != a.heads))) {
    return invalid("attention: the heads of queries, keys, values, pages and sinks do not fit each other");
  }
  std::int64_t const tokens = first.dims[1];
  std::int64_t whole[2];
  Sequences sequences;
  TIDE_RETURN_IF_FAILED(sequences_of(inputs, tokens, a, whole, sequences));
  std::int64_t longest = 0;
  for (std::int64_t i = 0; i < sequences.count; ++i) longest = std::max(longest, sequences.lengths[i]);
  Tensor const &cos = inputs[kCos], &sin = inputs[kSin], &bias = inputs[kBias];
  if ((cos.rank > 0 || sin.rank > 0) && (a.head_dim % 2 != 0 || !is_table(cos, longest, a.head_dim / 2) ||
                                         !is_table(sin, longest, a.head_dim / 2))) {
    return invalid("attention: the tables of the rotation do not fit the heads or the longest sequence");
  }
  if (bias.rank > 0 && (bias.rank != 2 || bias.dims[0] != a.heads || bias.dims[1] < longest)) {
    return invalid("attention: the table of biases does not fit the heads or the longest sequence");
  }

  bool const attends = query.rank > 0, writes = packed || key.rank > 0;
  std::int64_t const shape[] = {1, tokens, attends ? size : 0};
  Value* output;
  void *result, *keys = pages.data, *values = inputs[kValuePages].data;
  TIDE_RETURN_IF_FAILED(api.KernelContext_GetOutput(context, 0, shape, 3, &output));
  TIDE_RETURN_IF_FAILED(api.GetTensorMutableData(output, &result));
  if (writes) {
    TIDE_RETURN_IF_FAILED(new_pages_of(context, 1, pages, a.int8 ? 1 : 4, &keys));
    TIDE_RETURN_IF_FAILED(new_pages_of(context, 2, inputs[kValuePages], a.int8 ? 1 : 4, &values));
  }
  a.keys = static_cast<char const*>(keys);
  a.values = static_cast<char const*>(values);
  a.bias = static_cast<float const*>(bias.data);
  a.bias_stride = bias.dims[1];
  a.sinks = static_cast<float const*>(inputs[kSinks].data);

  AttentionKernel const* const of_tests = chosen;
  AttentionKernel const& kernel = of_tests == nullptr ? *attention_kernel() : *of_tests;
  static thread_local Buffer kept;
  Buffer once;
  std::int64_t const rows = attends ? tokens * a.heads : 0, floats = rows * (a.width + 2);
  float* const queries = (floats > kKeptQueries ? once : kept).of(floats);
  float* const states = queries + rows * a.width;
  auto const queries_in = static_cast<float const*>(query.data);
  NewTokens const taken{kernel,
                        a,
                        sequences,
                        {static_cast<float const*>(cos.data), static_cast<float const*>(sin.data),
                         attributes.interleaved != 0},
                        attributes.scale != 0 ? attributes.scale : 1 / std::sqrt(static_cast<float>(a.head_dim)),
                        attends ? queries_in : nullptr,
                        packed ? queries_in + size : static_cast<float const*>(key.data),
                        packed ? queries_in + size + kv_size : static_cast<float const*>(value.data),
                        query.dims[2],
                        packed ? query.dims[2] : kv_size,
                        static_cast<char*>(keys),
                        static_cast<char*>(values),
                        queries};
  auto const take = [&](std::int64_t part) {
    taken.take(part * kPartTokens, std::min((part + 1) * kPartTokens, tokens));
  };
  std::int64_t const new_floats = tokens * ((attends ? size : 0) + (writes ? 2 * kv_size : 0));
  TIDE_RETURN_IF_FAILED(
      in_parallel(context, (tokens + kPartTokens - 1) / kPartTokens, new_floats < kFewNewFloats, take));
  if (!attends) return nullptr;

  Spans spans(kernel, a);
  for (std::int64_t i = 0; i < sequences.count; ++i) {
    for (std::int64_t token = 0; token < sequences.tokens(i); token += kSpanTokens) {
      std::int64_t const count = std::min(kSpanTokens, sequences.tokens(i) - token), row = sequences.starts[i] + token;
      TIDE_RETURN_IF_FAILED(spans.add(
          context, {sequences.pages + i * sequences.longest_table, 0, sequences.first_position(i) + token,
                    count * a.group(), queries + row * a.heads * a.width, states + 2 * row * a.heads,
                    static_cast<float*>(result) + row * size}));
    }
  }
  return spans.compute(context);
}

Status* compute_attention(void* kernel, Context* context) {
  try {
    return compute_checked(*static_cast<Attributes const*>(kernel), context);
  } catch (std::bad_alloc const&) {
    return invalid("attention: not enough memory");
  }
}

template <bool kInt8>
Operator operator_of() {
  constexpr int kNumber = kInt8 ? abi::kInt8 : abi::kFloat;
  Operator op = cpu_operator();
  op.GetName = [](Operator const*) { return kInt8 ? "TideInt8PagedAttention" : "TidePagedAttention"; };
  op.GetInputType = [](Operator const*, std::size_t index) {
    if (index == kKeyPages || index == kValuePages) return kNumber;
    if (index == kPageTable) return abi::kInt32;
    return index == kLengths || index == kStarts ? abi::kInt64 : abi::kFloat;
  };
  op.GetInputTypeCount = [](Operator const*) -> std::size_t { return kInputs; };
  op.GetInputCharacteristic = [](Operator const*, std::size_t index) {
    return index < kKeyPages || index > kLengths ? abi::kOptional : 0;
  };
  op.GetOutputType = [](Operator const*, std::size_t index) { return index == 0 ? abi::kFloat : kNumber; };
  op.GetOutputTypeCount = [](Operator const*) -> std::size_t { return 3; };
  op.GetOutputCharacteristic = [](Operator const*, std::size_t index) { return index > 0 ? abi::kOptional : 0; };
  op.CreateKernelV2 = [](Operator const*, void const*, void const* info, void** kernel) -> Status* {
    auto const attributes = new (std::nothrow) Attributes;
    if (attributes == nullptr) return invalid("attention: not enough memory");
    attributes->int8 = kInt8;
    read_attribute(api.KernelInfoGetAttribute_int64, info, "num_heads", attributes->heads);
    read_attribute(api.KernelInfoGetAttribute_int64, info, "kv_num_heads", attributes->kv_heads);
    read_attribute(api.KernelInfoGetAttribute_float, info, "scale", attributes->scale);
    read_attribute(api.KernelInfoGetAttribute_float, info, "softcap", attributes->softcap);
    read_attribute(api.KernelInfoGetAttribute_int64, info, "local_window_size", attributes->window);
    read_attribute(api.KernelInfoGetAttribute_int64, info, "rotary_interleaved", attributes->interleaved);
    *kernel = attributes;
    return nullptr;
  };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Attributes*>(kernel); };
  op.KernelComputeV2 = compute_attention;
  return op;
}

}  // namespace

Operator attention_operator(bool int8) { return int8 ? operator_of<true>() : operator_of<false>(); }

bool use_attention_kernel(char const* name) {
  chosen = attention_kernel(name);
  return chosen != nullptr;
}

}  // namespace tide_ops

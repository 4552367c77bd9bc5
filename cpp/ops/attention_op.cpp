// TideFloatAttention and TideInt8Attention: com.microsoft.GroupQueryAttention, with the same inputs and attributes, on
// K/V buffers [1, kv_heads, capacity, head_dim], and in int8 [.., head_dim + 4] (see attention.h). New keys and values
// are stored before anything attends to them, so that a token's output does not depend on how many tokens are computed
// at once.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "attention.h"
#include "kernel.h"
#include "operators.h"

namespace tide_ops {
namespace {

enum Input {
  kQuery, kKey, kValue, kPastKey, kPastValue, kLast, kTotal, kCos, kSin, kPositionIds, kBias, kSinks, kInputs
};

constexpr std::int64_t kTaskRows = 32;        // queries that share the keys that are widened
constexpr std::int64_t kBlockTokens = 64;     // computed at a time; their partial results stay in a cache
constexpr std::int64_t kFewFloats = 1 << 13;  // of keys read; below, threads would cost more than they gain

struct Attributes {
  bool int8 = false;
  float scale = 0, softcap = 0;
  std::int64_t window = -1, interleaved = 0;
};

template <typename T, typename Entry>
void read_attribute(Entry const& entry, void const* info, char const* name, T& value) {
  if (Status* const missing = entry(info, name, &value)) {
    api.ReleaseStatus(missing);
  }
}

// The rotation of new tokens' heads by tables [.., head_dim / 2] of cosines and sines.
struct Rotation {
  float const *cos, *sin;  // of the first new token; null: none
  bool interleaved;

  void apply(float const* x, std::int64_t token, std::int64_t head_dim, float scale, float* rotated) const {
    if (cos == nullptr) {
      for (std::int64_t d = 0; d < head_dim; ++d) rotated[d] = x[d] * scale;
      return;
    }
    std::int64_t const half = head_dim / 2, step = interleaved ? 2 : 1, other = interleaved ? 1 : half;
    for (std::int64_t i = 0; i < half; ++i) {
      float const c = cos[token * half + i], s = sin[token * half + i];
      float const first = x[i * step], second = x[i * step + other];
      rotated[i * step] = (first * c - second * s) * scale;
      rotated[i * step + other] = (second * c + first * s) * scale;
    }
  }
};

// A block of tokens' attention, cut into tasks: a task is one chunk of keys of one head for some of the queries.
struct Tasks {
  AttentionKernel const& kernel;
  Attention const& attention;
  std::int64_t rows;  // of a task, at most
  std::int64_t first_chunk, chunks;
  float* partials;
  std::atomic<bool> out_of_memory{false};  // in a thread, which must not throw

  std::int64_t rows_of_head() const { return attention.tokens * (attention.heads / attention.kv_heads); }
  std::int64_t blocks_of_head() const { return (rows_of_head() + rows - 1) / rows; }
  std::int64_t blocks() const { return attention.kv_heads * blocks_of_head(); }
  std::int64_t stride() const { return partial_floats(attention, rows); }
  QueryRows queries(std::int64_t block) const {
    std::int64_t const first = block % blocks_of_head() * rows;
    return {block / blocks_of_head(), first, std::min(rows, rows_of_head() - first)};
  }
};

void run_task(void* data, std::size_t index) {
  Tasks& tasks = *static_cast<Tasks*>(data);
  static thread_local Buffer kept;
  // One chunk of keys for all queries of its head after the other: it stays in a cache.
  std::int64_t const task = static_cast<std::int64_t>(index), of_chunk = task / tasks.blocks_of_head();
  std::int64_t const head = of_chunk / tasks.chunks, chunk = of_chunk % tasks.chunks;
  std::int64_t const block = head * tasks.blocks_of_head() + task % tasks.blocks_of_head();
  QueryRows const rows = tasks.queries(block);
  try {
    tasks.kernel.attend(tasks.attention, rows, tasks.first_chunk + chunk,
                        tasks.partials + (block * tasks.chunks + chunk) * tasks.stride(),
                        kept.of(scratch_floats(tasks.attention, rows.count)));
  } catch (std::bad_alloc const&) {
    tasks.out_of_memory = true;
  }
}

Status* attend(Context* context, AttentionKernel const& kernel, Attention const& attention) {
  static thread_local Buffer kept;
  std::int64_t const group = attention.heads / attention.kv_heads;
  std::int64_t const oldest = attention.total - attention.tokens + 1 - attention.window;
  std::int64_t const first_key = attention.window > 0 ? std::max<std::int64_t>(oldest, 0) : 0;
  std::int64_t const first_chunk = first_key / kChunk, chunks = (attention.total - 1) / kChunk + 1 - first_chunk;
  Tasks tasks{kernel, attention, std::max(group, kTaskRows / group * group), first_chunk, chunks, nullptr};
  std::int64_t const count = tasks.blocks() * chunks, stride = tasks.stride();
  tasks.partials = kept.of(count * stride);
  if (attention.kv_heads * (attention.total - first_key) * attention.head_dim < kFewFloats) {
    for (std::int64_t task = 0; task < count; ++task) run_task(&tasks, static_cast<std::size_t>(task));
  } else {
    auto const tasks_of_all = static_cast<std::size_t>(count);
    TIDE_RETURN_IF_FAILED(api.KernelContext_ParallelFor(context, run_task, tasks_of_all, 0, &tasks));
  }
  if (tasks.out_of_memory) throw std::bad_alloc();
  for (std::int64_t block = 0; block < tasks.blocks(); ++block) {
    kernel.merge(attention, tasks.queries(block), tasks.partials + block * chunks * stride, chunks, stride);
  }
  return nullptr;
}

Status* invalid(char const* message) { return api.CreateStatus(abi::kInvalidArgument, message); }

// The present buffer: the past one's memory where both are bound to it, else a copy.
Status* present_of(Context* context, std::size_t output, Tensor const& past, std::int64_t size, void** data) {
  Value* value;
  TIDE_RETURN_IF_FAILED(api.KernelContext_GetOutput(context, output, past.dims, past.rank, &value));
  TIDE_RETURN_IF_FAILED(api.GetTensorMutableData(value, data));
  if (*data != past.data) {
    std::int64_t bytes = size;
    for (std::size_t d = 0; d < past.rank; ++d) bytes *= past.dims[d];
    std::memcpy(*data, past.data, static_cast<std::size_t>(bytes));
  }
  return nullptr;
}

// Rotates a token's queries, and its keys and values into the buffers.
struct Tokens {
  AttentionKernel const& kernel;
  Rotation rotation;
  float const *query, *key, *value;       // a token's heads, [.., head_dim]; key null: none are written
  std::int64_t query_stride, key_stride;  // floats from one token to the next
  char *keys, *values;                    // the buffers
  float scale;

  // `token`: of all new ones; `row`: of the block that `attention` computes.
  void take(Attention const& attention, std::int64_t token, std::int64_t row, float* queries,
            float* rotated) const {
    std::int64_t const head_dim = attention.head_dim, group = attention.heads / attention.kv_heads;
    for (std::int64_t head = 0; head < attention.heads; ++head) {
      std::int64_t const to = ((head / group * attention.tokens + row) * group + head % group) * attention.width;
      rotation.apply(query + token * query_stride + head * head_dim, token, head_dim, scale, queries + to);
      std::fill(queries + to + head_dim, queries + to + attention.width, 0.0f);
    }
    std::int64_t const position = attention.total - attention.tokens + row;
    for (std::int64_t head = 0; key != nullptr && head < attention.kv_heads; ++head) {
      std::int64_t const from = token * key_stride + head * head_dim;
      std::int64_t const to = (head * attention.capacity + position) * attention.row_bytes();
      rotation.apply(key + from, token, head_dim, 1, rotated);
      if (attention.int8) {
        kernel.store_int8(rotated, head_dim, keys + to);
        kernel.store_int8(value + from, head_dim, values + to);
      } else {
        std::memcpy(keys + to, rotated, 4 * static_cast<std::size_t>(head_dim));
        std::memcpy(values + to, value + from, 4 * static_cast<std::size_t>(head_dim));
      }
    }
  }
};

Status* compute_checked(Attributes const& attributes, Context* context) {
  Tensor inputs[kInputs];
  for (std::size_t i = 0; i < kInputs; ++i) TIDE_RETURN_IF_FAILED(input_of(context, i, inputs[i]));
  Tensor const &query = inputs[kQuery], &key = inputs[kKey], &past = inputs[kPastKey];
  bool const packed = key.rank == 0;  // keys and values follow each token's queries
  if (query.rank != 3 || (!packed && key.rank != 3) || past.rank != 4 || query.dims[0] != 1 || past.dims[0] != 1) {
    return invalid("attention takes queries and keys [1, S, ..] and buffers [1, kv_heads, capacity, head_dim (+ 4)]");
  }
  Attention attention{};
  attention.int8 = attributes.int8;
  std::int64_t const head_dim = past.dims[3] - (attention.int8 ? kScaleBytes : 0), kv_heads = past.dims[1];
  std::int64_t const tokens = query.dims[1];
  std::int64_t const kv_size = kv_heads * head_dim;
  attention.heads = head_dim < 1 ? 0 : query.dims[2] / head_dim - (packed ? 2 * kv_heads : 0);
  if (kv_heads < 1 || attention.heads < 1 || attention.heads % kv_heads != 0 || query.dims[2] % head_dim != 0 ||
      (!packed && key.dims[1] > 0 && (key.dims[1] != tokens || key.dims[2] != kv_size))) {
    return invalid("attention: the heads of queries, keys and buffers do not fit each other");
  }
  attention.kv_heads = kv_heads;
  attention.head_dim = head_dim;
  attention.width = (head_dim + 15) / 16 * 16;
  attention.capacity = past.dims[2];
  attention.window = std::max<std::int64_t>(attributes.window, 0);
  attention.softcap = attributes.softcap;
  std::int64_t const total = *static_cast<std::int32_t const*>(inputs[kTotal].data), first = total - tokens;
  if (first < 0 || total > attention.capacity) {
    return invalid("attention: more tokens than the K/V buffers hold");
  }
  bool const rotates = inputs[kCos].data != nullptr;
  if (rotates && (inputs[kCos].rank != 2 || inputs[kCos].dims[0] < total || 2 * inputs[kCos].dims[1] != head_dim)) {
    return invalid("attention: the tables of the rotation are too small");
  }
  Value* output;
  void* result;
  std::int64_t const shape[] = {1, tokens, attention.heads * head_dim};
  TIDE_RETURN_IF_FAILED(api.KernelContext_GetOutput(context, 0, shape, 3, &output));
  TIDE_RETURN_IF_FAILED(api.GetTensorMutableData(output, &result));
  void *keys = past.data, *values = inputs[kPastValue].data;
  bool const writes = packed || key.dims[1] > 0;
  if (writes) {
    std::int64_t const size = attention.int8 ? 1 : 4;
    TIDE_RETURN_IF_FAILED(present_of(context, 1, past, size, &keys));
    TIDE_RETURN_IF_FAILED(present_of(context, 2, inputs[kPastValue], size, &values));
  }
  std::int64_t const row = first * (head_dim / 2);
  AttentionKernel const& kernel = *attention_kernel();
  auto const queries_in = static_cast<float const*>(query.data);
  float const* const keys_in = packed ? queries_in + shape[2] : static_cast<float const*>(key.data);
  Tokens const taken{kernel,
                     {rotates ? static_cast<float const*>(inputs[kCos].data) + row : nullptr,
                      rotates ? static_cast<float const*>(inputs[kSin].data) + row : nullptr,
                      attributes.interleaved != 0},
                     queries_in,
                     writes ? keys_in : nullptr,
                     packed ? keys_in + kv_size : static_cast<float const*>(inputs[kValue].data),
                     query.dims[2],
                     packed ? query.dims[2] : kv_size,
                     static_cast<char*>(keys),
                     static_cast<char*>(values),
                     attributes.scale != 0 ? attributes.scale : 1 / std::sqrt(static_cast<float>(head_dim))};
  attention.keys = taken.keys;
  attention.values = taken.values;
  attention.sinks = static_cast<float const*>(inputs[kSinks].data);
  attention.bias_token_stride = total;
  attention.bias_head_stride = inputs[kBias].rank == 4 && inputs[kBias].dims[1] > 1 ? tokens * total : 0;
  static thread_local Buffer kept;
  float* const queries = kept.of(kBlockTokens * attention.heads * attention.width + head_dim);
  float* const rotated = queries + kBlockTokens * attention.heads * attention.width;
  attention.queries = queries;
  for (std::int64_t start = 0; start < tokens; start += kBlockTokens) {
    attention.tokens = std::min(kBlockTokens, tokens - start);
    attention.total = first + start + attention.tokens;
    attention.output = static_cast<float*>(result) + start * shape[2];
    if (inputs[kBias].data != nullptr) attention.bias = static_cast<float const*>(inputs[kBias].data) + start * total;
    for (std::int64_t i = 0; i < attention.tokens; ++i) taken.take(attention, start + i, i, queries, rotated);
    TIDE_RETURN_IF_FAILED(attend(context, kernel, attention));
  }
  return nullptr;
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
  op.GetName = [](Operator const*) { return kInt8 ? "TideInt8Attention" : "TideFloatAttention"; };
  op.GetInputType = [](Operator const*, std::size_t index) {
    if (index == kPastKey || index == kPastValue) return kNumber;
    if (index == kPositionIds) return abi::kInt64;
    return index == kLast || index == kTotal ? abi::kInt32 : abi::kFloat;
  };
  op.GetInputTypeCount = [](Operator const*) -> std::size_t { return kInputs; };
  op.GetInputCharacteristic = [](Operator const*, std::size_t index) {
    return index > kTotal || index == kKey || index == kValue ? abi::kOptional : 0;
  };
  op.GetOutputType = [](Operator const*, std::size_t index) { return index == 0 ? abi::kFloat : kNumber; };
  op.GetOutputTypeCount = [](Operator const*) -> std::size_t { return 3; };
  op.GetOutputCharacteristic = [](Operator const*, std::size_t index) { return index > 0 ? abi::kOptional : 0; };
  op.CreateKernelV2 = [](Operator const*, void const*, void const* info, void** kernel) -> Status* {
    auto const attributes = new (std::nothrow) Attributes;
    if (attributes == nullptr) return invalid("attention: not enough memory");
    attributes->int8 = kInt8;
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

}  // namespace tide_ops

#include "operators.h"

#include <algorithm>
#include <mutex>
#include <new>

#include "candidate.h"
#include "gate.h"
#include "half_matmul.h"
#include "kernel.h"
#include "quantized_matmul.h"

namespace tide_ops {

abi::Api api;

namespace {

constexpr std::int64_t kChunkBytes = 48 << 10;  // of weights, taken by one thread at a time; they stay in its cache
constexpr std::int64_t kKeptFloats = 1 << 18;   // a larger buffer is not kept by the thread that needed it
constexpr std::int64_t kRows = 16;              // rounded by one thread at a time

// Memory for `count` floats that lives as long as `once` at least; null if there is none.
float* scratch(std::int64_t count, Buffer& once) {
  static thread_local Buffer kept;
  try {
    return (count > kKeptFloats ? once : kept).of(count);
  } catch (std::bad_alloc const&) {
    return nullptr;
  }
}

// Rows of weights that one thread takes at a time.
std::int64_t chunk_of(std::int64_t row_bytes) {
  return std::max<std::int64_t>(kChunkBytes / std::max<std::int64_t>(row_bytes, 1) / 4 * 4, 4);
}

// Calls `part` for each `part_size` of `size`, by its index.
Status* in_parallel(Context* context, abi::Parallel part, std::int64_t size, std::int64_t part_size, void* data) {
  auto const count = static_cast<std::size_t>((size + part_size - 1) / part_size);
  return api.KernelContext_ParallelFor(context, part, count, 0, data);
}

// y [M, N], computed in chunks of columns. Gated, it is SiLU(x G^T) * (x U^T): G, U are halves of the rows of weights.
struct Result {
  std::int64_t m_size, n_size, chunk;
  float *y, *gates;  // [M, N]; gates: null if it is not gated

  // multiply(n, count, to): by `count` rows of weights from row n on, to columns of a matrix [M, N].
  template <typename Multiply>
  void compute(std::size_t index, Multiply const& multiply) const {
    std::int64_t const start = static_cast<std::int64_t>(index) * chunk, count = std::min(chunk, n_size - start);
    if (gates == nullptr) return multiply(start, count, y + start);
    multiply(start, count, gates + start);
    multiply(n_size + start, count, y + start);
    GateKernel const& gate = *gate_kernel();
    for (std::int64_t at = start; at < m_size * n_size; at += n_size) gate.apply(gates + at, count, y + at);
  }

  // Of threads' parts, if rows of weights have that many bytes.
  void divide(std::int64_t row_bytes) { chunk = chunk_of(gates == nullptr ? row_bytes : 2 * row_bytes); }
};

// Makes the result of x [.., K] and `rows` of weights; y stays null if it is empty. `gates` are still missing.
Status* make_result(Context* context, Tensor& x, std::int64_t rows, bool gated, Result& result) {
  if (gated && rows % 2 != 0) {
    return api.CreateStatus(abi::kInvalidArgument, "a matmul with a gate takes as many rows for it as for the rest");
  }
  result.m_size = 1;
  for (std::size_t d = 0; d + 1 < x.rank; ++d) result.m_size *= x.dims[d];
  x.dims[x.rank - 1] = result.n_size = gated ? rows / 2 : rows;
  Value* y;
  TIDE_RETURN_IF_FAILED(api.KernelContext_GetOutput(context, 0, x.dims, x.rank, &y));
  if (result.m_size == 0 || result.n_size == 0) return nullptr;
  return api.GetTensorMutableData(y, reinterpret_cast<void**>(&result.y));
}

// Memory for `count` floats and the gates of the result; null if there is none.
float* scratch(std::int64_t count, bool gated, Result& result, Buffer& once) {
  float* const floats = scratch(count + (gated ? result.m_size * result.n_size : 0), once);
  if (gated && floats != nullptr) result.gates = floats + count;
  return floats;
}

struct Product {
  HalfKernel const& kernel;
  SplitRows x;
  std::uint16_t const* weights;  // [N, K]
  Result result;
};

void multiply_chunk(void* data, std::size_t index) {
  Product const& product = *static_cast<Product const*>(data);
  product.result.compute(index, [&](std::int64_t n, std::int64_t count, float* to) {
    product.kernel.multiply(product.x, product.weights + n * product.x.k_size, count, to, product.result.n_size);
  });
}

// y [.., N] = x [.., K] times the transpose of weights, bfloat16 or float16 [N, K]; sums are float32.
template <HalfFormat kFormat, bool kGated>
Status* compute_half(void*, Context* context) {
  Tensor x, weights;
  TIDE_RETURN_IF_FAILED(input_of(context, 0, x));
  TIDE_RETURN_IF_FAILED(input_of(context, 1, weights));
  if (x.rank < 1 || x.rank > kMaxRank || weights.rank != 2 || weights.dims[1] != x.dims[x.rank - 1]) {
    return api.CreateStatus(abi::kInvalidArgument,
                            "TideBf16MatMul and TideFp16MatMul take x [.., K] and weights [N, K]");
  }
  std::int64_t const k_size = weights.dims[1], stride = SplitRows::stride(k_size);
  Result result{};
  TIDE_RETURN_IF_FAILED(make_result(context, x, weights.dims[0], kGated, result));
  if (result.y == nullptr) return nullptr;

  Buffer once;
  float* const split = scratch(result.m_size * stride, kGated, result, once);
  if (split == nullptr) {
    return api.CreateStatus(abi::kInvalidArgument, "TideBf16MatMul, TideFp16MatMul: not enough memory");
  }
  HalfKernel const& kernel = *half_kernel(kFormat);
  for (std::int64_t m = 0; m < result.m_size; ++m) {
    kernel.split_row(static_cast<float const*>(x.data) + m * k_size, k_size, split + m * stride);
  }
  result.divide(2 * k_size);
  auto const numbers = static_cast<std::uint16_t const*>(weights.data);
  Product product{kernel, {split, result.m_size, k_size}, numbers, result};
  return in_parallel(context, multiply_chunk, result.n_size, result.chunk, &product);
}

struct IntegerProduct {
  IntegerWeights weights;
  float const* x;         // [M, K]
  RoundedInputs* inputs;  // [M, groups]
  std::int64_t k_size;
  Result result;
};

void round_rows(void* data, std::size_t index) {
  IntegerProduct const& product = *static_cast<IntegerProduct const*>(data);
  std::int64_t const start = static_cast<std::int64_t>(index) * kRows;
  for (std::int64_t m = start; m < std::min(start + kRows, product.result.m_size); ++m) {
    round_row(product.x + m * product.k_size, product.k_size, product.weights,
              product.inputs + m * product.weights.groups());
  }
}

void multiply_integer_chunk(void* data, std::size_t index) {
  IntegerProduct const& product = *static_cast<IntegerProduct const*>(data);
  Result const& result = product.result;
  result.compute(index, [&](std::int64_t n, std::int64_t count, float* to) {
    multiply_integers(product.inputs, result.m_size, product.weights, n, count, to, result.n_size);
  });
}

// y [.., N] = x [.., K], rounded to 8 bits, times the transpose of weights: integers [N, blocks, block_size * bits / 8]
// and scales [N, blocks].
template <int kBits, bool kGated>
Status* compute_integers(void*, Context* context) {
  Tensor x, integers, scales;
  TIDE_RETURN_IF_FAILED(input_of(context, 0, x));
  TIDE_RETURN_IF_FAILED(input_of(context, 1, integers));
  TIDE_RETURN_IF_FAILED(input_of(context, 2, scales));
  bool const shapes = x.rank >= 1 && x.rank <= kMaxRank && integers.rank == 3 && scales.rank == 2 &&
                      scales.dims[0] == integers.dims[0] && scales.dims[1] == integers.dims[1];
  std::int64_t const k_size = shapes ? x.dims[x.rank - 1] : 0, block_size = shapes ? integers.dims[2] * 8 / kBits : 0;
  if (!shapes || !is_block_size(block_size) || (k_size + block_size - 1) / block_size != integers.dims[1]) {
    return api.CreateStatus(abi::kInvalidArgument, "TideInt4MatMul and TideInt8MatMul take x [.., K], integers [N, "
                                                   "blocks, bytes of a block] and scales [N, blocks]");
  }
  IntegerProduct product{};
  product.weights = {static_cast<std::uint8_t const*>(integers.data), static_cast<float const*>(scales.data),
                     integers.dims[1], block_size, kBits};
  product.x = static_cast<float const*>(x.data);
  product.k_size = k_size;
  Result& result = product.result;
  TIDE_RETURN_IF_FAILED(make_result(context, x, integers.dims[0], kGated, result));
  if (result.y == nullptr) return nullptr;
  Buffer once;
  std::int64_t const row = product.weights.groups() * static_cast<std::int64_t>(sizeof(RoundedInputs) / sizeof(float));
  product.inputs = reinterpret_cast<RoundedInputs*>(scratch(result.m_size * row, kGated, result, once));
  if (product.inputs == nullptr) {
    return api.CreateStatus(abi::kInvalidArgument, "TideInt4MatMul, TideInt8MatMul: not enough memory");
  }
  if (result.m_size <= kRows) {
    round_rows(&product, 0);
  } else {
    TIDE_RETURN_IF_FAILED(in_parallel(context, round_rows, result.m_size, kRows, &product));
  }
  result.divide(product.weights.row_bytes());
  if (result.m_size >= kManyRows) result.chunk = kPanelRows;
  return in_parallel(context, multiply_integer_chunk, result.n_size, result.chunk, &product);
}

Operator matmul_operator() {
  Operator op = cpu_operator();
  op.GetOutputType = [](Operator const*, std::size_t) { return abi::kFloat; };
  op.GetOutputTypeCount = [](Operator const*) -> std::size_t { return 1; };
  op.CreateKernelV2 = [](Operator const*, void const*, void const*, void** kernel) -> Status* {
    static char stateless;
    *kernel = &stateless;
    return nullptr;
  };
  op.KernelDestroy = [](void*) {};
  return op;
}

template <HalfFormat kFormat, bool kGated>
Operator half_operator() {
  constexpr bool kIsBf16 = kFormat == HalfFormat::kBf16;
  Operator op = matmul_operator();
  op.GetName = [](Operator const*) {
    if (kGated) return kIsBf16 ? "TideGatedBf16MatMul" : "TideGatedFp16MatMul";
    return kIsBf16 ? "TideBf16MatMul" : "TideFp16MatMul";
  };
  op.GetInputType = [](Operator const*, std::size_t index) {
    return index == 0 ? abi::kFloat : kIsBf16 ? abi::kBFloat16 : abi::kFloat16;
  };
  op.GetInputTypeCount = [](Operator const*) -> std::size_t { return 2; };
  op.KernelComputeV2 = compute_half<kFormat, kGated>;
  return op;
}

template <int kBits, bool kGated>
Operator integer_operator() {
  Operator op = matmul_operator();
  op.GetName = [](Operator const*) {
    if (kGated) return kBits == 4 ? "TideGatedInt4MatMul" : "TideGatedInt8MatMul";
    return kBits == 4 ? "TideInt4MatMul" : "TideInt8MatMul";
  };
  op.GetInputType = [](Operator const*, std::size_t index) { return index == 1 ? abi::kUInt8 : abi::kFloat; };
  op.GetInputTypeCount = [](Operator const*) -> std::size_t { return 3; };
  op.KernelComputeV2 = compute_integers<kBits, kGated>;
  return op;
}

Operator const operators[] = {
    half_operator<HalfFormat::kBf16, false>(), half_operator<HalfFormat::kBf16, true>(),
    half_operator<HalfFormat::kFp16, false>(), half_operator<HalfFormat::kFp16, true>(),
    candidate_operator(false),                 candidate_operator(true),
    attention_operator(false),                 attention_operator(true)};
Operator const integer_operators[] = {integer_operator<4, false>(), integer_operator<4, true>(),
                                        integer_operator<8, false>(), integer_operator<8, true>()};

}  // namespace

std::string operator_names() {
  std::string names;
  for (Operator const& op : operators) names += std::string(op.GetName(&op)) + ' ';
  for (Operator const& op : integer_operators) names += std::string(op.GetName(&op)) + ' ';
  return names;
}

Status* register_operators(abi::SessionOptions* options, abi::ApiBase const* base) {
  static std::mutex mutex;
  static abi::Domain* domain = nullptr;  // sessions refer to it as long as they live
  std::lock_guard<std::mutex> const lock(mutex);
  if (domain == nullptr) {
    api.set(base->GetApi(abi::kVersion));
    if (!api) return nullptr;  // an older ONNX Runtime: graphs run without the operators, which are functions too
    abi::Domain* made;
    TIDE_RETURN_IF_FAILED(api.CreateCustomOpDomain("tide", &made));
    for (Operator const& op : operators) TIDE_RETURN_IF_FAILED(api.CustomOpDomain_Add(made, &op));
    if (integers_supported()) {  // on other CPUs their function runs: MatMulNBits
      for (Operator const& op : integer_operators) TIDE_RETURN_IF_FAILED(api.CustomOpDomain_Add(made, &op));
    }
    domain = made;
  }
  return api.AddCustomOpDomain(options, domain);
}

}  // namespace tide_ops

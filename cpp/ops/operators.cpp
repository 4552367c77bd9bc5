#include "operators.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <new>

#include "bf16_matmul.h"
#include "candidate.h"
#include "kernel.h"

namespace tide_ops {

abi::Api api;

namespace {

constexpr std::int64_t kChunkBytes = 48 << 10;  // of weights, taken by one thread at a time; they stay in its cache
constexpr std::int64_t kKeptFloats = 1 << 18;   // a larger buffer is not kept by the thread that needed it

// Memory for floats, aligned to cache lines; what was in it is lost when it grows.
class Buffer {
 public:
  float* of(std::int64_t count) {
    if (count > size_) {
      floats_.reset(static_cast<float*>(::operator new(4 * static_cast<std::size_t>(count), std::align_val_t{64})));
      size_ = count;
    }
    return floats_.get();
  }

 private:
  struct Free {
    void operator()(float* floats) const { ::operator delete(floats, std::align_val_t{64}); }
  };
  std::unique_ptr<float, Free> floats_;
  std::int64_t size_ = 0;
};

struct Product {
  Bf16Kernel const& kernel;
  SplitRows x;
  std::uint16_t const* weights;  // [N, K]
  std::int64_t n_size, chunk;
  float* y;  // [M, N]
};

void multiply_chunk(void* data, std::size_t index) {
  Product const& product = *static_cast<Product const*>(data);
  std::int64_t const start = static_cast<std::int64_t>(index) * product.chunk;
  std::int64_t const count = std::min(product.chunk, product.n_size - start);
  product.kernel.multiply(product.x, product.weights + start * product.x.k_size, count, product.y + start,
                          product.n_size);
}

// y [.., N] = x [.., K] times the transpose of weights, bfloat16 [N, K]; sums are float32.
Status* compute(void*, Context* context) {
  Tensor x, weights;
  TIDE_RETURN_IF_FAILED(input_of(context, 0, x));
  TIDE_RETURN_IF_FAILED(input_of(context, 1, weights));
  if (x.rank < 1 || x.rank > kMaxRank || weights.rank != 2 || weights.dims[1] != x.dims[x.rank - 1]) {
    return api.CreateStatus(abi::kInvalidArgument, "TideBf16MatMul takes x [.., K] and weights [N, K]");
  }
  std::int64_t const n_size = weights.dims[0], k_size = weights.dims[1];
  std::int64_t m_size = 1;
  for (std::size_t d = 0; d + 1 < x.rank; ++d) m_size *= x.dims[d];
  x.dims[x.rank - 1] = n_size;
  Value* y;
  void* result;
  TIDE_RETURN_IF_FAILED(api.KernelContext_GetOutput(context, 0, x.dims, x.rank, &y));
  if (m_size == 0 || n_size == 0) return nullptr;
  TIDE_RETURN_IF_FAILED(api.GetTensorMutableData(y, &result));

  static thread_local Buffer kept;
  Buffer once;
  std::int64_t const stride = (k_size + 15) / 16 * 16;  // rows begin at cache lines
  float* split;
  try {
    split = (m_size * stride > kKeptFloats ? once : kept).of(m_size * stride);
  } catch (std::bad_alloc const&) {
    return api.CreateStatus(abi::kInvalidArgument, "TideBf16MatMul: not enough memory");
  }
  Bf16Kernel const& kernel = *bf16_kernel();
  for (std::int64_t m = 0; m < m_size; ++m) {
    kernel.split_row(static_cast<float const*>(x.data) + m * k_size, k_size, split + m * stride);
  }
  std::int64_t const row_bytes = std::max<std::int64_t>(2 * k_size, 1);
  std::int64_t const chunk = std::max<std::int64_t>(kChunkBytes / row_bytes / 4 * 4, 4);
  Product product{kernel,
                  {split, stride, m_size, k_size},
                  static_cast<std::uint16_t const*>(weights.data),
                  n_size,
                  chunk,
                  static_cast<float*>(result)};
  auto const chunks = static_cast<std::size_t>((n_size + chunk - 1) / chunk);
  return api.KernelContext_ParallelFor(context, multiply_chunk, chunks, 0, &product);
}

Operator make_operator() {
  Operator op = cpu_operator();
  op.GetName = [](Operator const*) { return "TideBf16MatMul"; };
  op.GetInputType = [](Operator const*, std::size_t index) { return index == 0 ? abi::kFloat : abi::kBFloat16; };
  op.GetInputTypeCount = [](Operator const*) -> std::size_t { return 2; };
  op.GetOutputType = [](Operator const*, std::size_t) { return abi::kFloat; };
  op.GetOutputTypeCount = [](Operator const*) -> std::size_t { return 1; };
  op.CreateKernelV2 = [](Operator const*, void const*, void const*, void** kernel) -> Status* {
    static char stateless;
    *kernel = &stateless;
    return nullptr;
  };
  op.KernelDestroy = [](void*) {};
  op.KernelComputeV2 = compute;
  return op;
}

}  // namespace

Status* register_operators(abi::SessionOptions* options, abi::ApiBase const* base) {
  static Operator const operators[] = {make_operator(), candidate_operator(false), candidate_operator(true)};
  static std::mutex mutex;
  static abi::Domain* domain = nullptr;  // sessions refer to it as long as they live
  std::lock_guard<std::mutex> const lock(mutex);
  if (domain == nullptr) {
    api.set(base->GetApi(abi::kVersion));
    if (!api) return nullptr;  // an older ONNX Runtime: graphs run without the operators, which are functions too
    abi::Domain* made;
    TIDE_RETURN_IF_FAILED(api.CreateCustomOpDomain("tide", &made));
    for (Operator const& op : operators) TIDE_RETURN_IF_FAILED(api.CustomOpDomain_Add(made, &op));
    domain = made;
  }
  return api.AddCustomOpDomain(options, domain);
}

}  // namespace tide_ops

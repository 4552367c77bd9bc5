// What the operators for matrices share: the result, divided among threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <new>

#include "gate.h"
#include "parallel.h"

namespace tide_ops {

constexpr std::int64_t kChunkBytes = 48 << 10;  // of weights, taken by one thread at a time; they stay in its cache
constexpr std::int64_t kKeptFloats = 1 << 18;   // a larger buffer is not kept by the thread that needed it

// y [M, N], computed in chunks of columns. Gated, it is SiLU(x G^T) * (x U^T): G, U are halves of the rows of weights.
struct Result {
  std::int64_t m_size, n_size, chunk;
  float *y, *gates;  // [M, N]; gates: null if it is not gated

  // Makes it of x [.., K] and `rows` of weights; y stays null if it is empty. `gates` are still missing.
  Status* make(Context* context, Tensor& x, std::int64_t rows, bool gated) {
    if (gated && rows % 2 != 0) {
      return api.CreateStatus(abi::kInvalidArgument, "a matmul with a gate takes as many rows for it as for the rest");
    }
    m_size = 1;
    for (std::size_t d = 0; d + 1 < x.rank; ++d) m_size *= x.dims[d];
    x.dims[x.rank - 1] = n_size = gated ? rows / 2 : rows;
    Value* value;
    TIDE_RETURN_IF_FAILED(api.KernelContext_GetOutput(context, 0, x.dims, x.rank, &value));
    if (m_size == 0 || n_size == 0) return nullptr;
    return api.GetTensorMutableData(value, reinterpret_cast<void**>(&y));
  }

  // Memory for `count` floats, and for the gates; it lives as long as `once` at least. Throws std::bad_alloc.
  float* scratch(std::int64_t count, bool gated, Buffer& once) {
    static thread_local Buffer kept;
    std::int64_t const all = count + (gated ? m_size * n_size : 0);
    float* const floats = (all > kKeptFloats ? once : kept).of(all);
    if (gated) gates = floats + count;
    return floats;
  }

  // Divides it into chunks of a multiple of `step` rows of weights, which have so many bytes, and calls
  // multiply(n, count, to) for each: by `count` rows from row n on, to columns of a matrix [M, N].
  template <typename Multiply>
  Status* compute(Context* context, std::int64_t row_bytes, std::int64_t step, Multiply const& multiply) {
    std::int64_t const bytes = std::max<std::int64_t>(gates == nullptr ? row_bytes : 2 * row_bytes, 1);
    chunk = std::max<std::int64_t>(kChunkBytes / bytes / step, 1) * step;
    return in_parallel(context, (n_size + chunk - 1) / chunk, false, [&](std::int64_t index) {
      std::int64_t const start = index * chunk, count = std::min(chunk, n_size - start);
      if (gates == nullptr) return multiply(start, count, y + start);
      multiply(start, count, gates + start);
      multiply(n_size + start, count, y + start);
      GateKernel const& gate = *gate_kernel();
      for (std::int64_t at = start; at < m_size * n_size; at += n_size) gate.apply(gates + at, count, y + at);
    });
  }
};

// An operator whose kernels each keep a `Kept`; its name, input types and computation are missing.
template <typename Kept>
Operator matmul_operator() {
  Operator op = cpu_operator();
  op.GetOutputType = [](Operator const*, std::size_t) { return abi::kFloat; };
  op.GetOutputTypeCount = [](Operator const*) -> std::size_t { return 1; };
  op.CreateKernelV2 = [](Operator const*, void const*, void const*, void** kernel) -> Status* {
    *kernel = new (std::nothrow) Kept;
    return *kernel != nullptr ? nullptr : api.CreateStatus(abi::kInvalidArgument, "not enough memory for an operator");
  };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kept*>(kernel); };
  return op;
}

}  // namespace tide_ops

// What the nodes that multiply by matrices share: the result, divided among threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "elementwise.h"
#include "node.h"

namespace tide_ops {

constexpr std::int64_t kChunkBytes = 96 << 10;  // of weights, taken by one thread at a time; they stay in its cache

// y [M, N], computed in chunks of columns. Gated, it is SiLU(x G^T) * (x U^T): G, U are halves of the rows of weights.
struct Product {
  std::int64_t m_size, n_size;
  float *y, *gates;  // [M, N]; gates: null if it is not gated

  // Makes it of x [.., K] and `rows` of weights; y stays null if it is empty.
  Status* make(Operands const& operands, Tensor& x, std::int64_t rows, bool gated) {
    if (gated && rows % 2 != 0) return invalid("a matmul with a gate takes as many rows for it as for the rest");
    m_size = 1;
    for (std::size_t d = 0; d + 1 < x.rank; ++d) m_size *= x.dims[d];
    x.dims[x.rank - 1] = n_size = gated ? rows / 2 : rows;
    void* data;
    TIDE_RETURN_IF_FAILED(operands.output(0, x.dims, x.rank, &data));
    y = m_size > 0 && n_size > 0 ? static_cast<float*>(data) : nullptr;
    return nullptr;
  }

  // Memory for `count` floats, and for the gates.
  float* scratch(Run& run, std::int64_t count, bool gated) {
    float* const floats = run.scratch(count + (gated ? m_size * n_size : 0));
    gates = gated ? floats + count : nullptr;
    return floats;
  }

  // Divides it into chunks of a multiple of `step` rows of weights, which have so many bytes, and adds the phase that
  // calls multiply(n, count, to) for each: by `count` rows from row n on of each matrix, to columns of its matrix [M, N];
  // the second is null if there is no gate. weights: where they lie in this order, or null.
  template <typename Multiply>
  void add(Run& run, void const* weights, std::int64_t row_bytes, std::int64_t step, Multiply multiply) const {
    std::int64_t const bytes = std::max<std::int64_t>(gates == nullptr ? row_bytes : 2 * row_bytes, 1);
    std::int64_t const chunk = std::max<std::int64_t>(kChunkBytes / bytes / step, 1) * step;
    auto const part = [all = *this, chunk, multiply](std::int64_t index) {
      std::int64_t const start = index * chunk, count = std::min(chunk, all.n_size - start);
      float* const y = all.y + start;
      if (all.gates == nullptr) return multiply(start, count, {y, nullptr});
      multiply(start, count, {all.gates + start, y});
      auto const gate = elementwise_kernel()->gate;
      for (std::int64_t at = start; at < all.m_size * all.n_size; at += all.n_size) {
        gate(all.gates + at, count, all.y + at);
      }
    };
    run.add((n_size + chunk - 1) / chunk, part, {static_cast<char const*>(weights), n_size * bytes});
    run.needs_threads();
  }
};

}  // namespace tide_ops

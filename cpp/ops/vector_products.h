// A few vectors times matrices each, for operators that multiply little.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernel.h"
#include "targets.h"

namespace tide_ops {

constexpr std::int64_t kVectorChunk = 8 << 10;  // weights that one thread reads at a time

// Of `rows` vectors, the first values of each: x [rows, stride] at K of them, y [rows, N] += x weights [K, N].
struct Rows {
  float const* x;
  float* y;
  std::int64_t stride, rows;
};
using AddRows = void (*)(Rows const& rows, float const* weights, std::int64_t k_size, std::int64_t n_size);

// COUNT rows, by the same sums however many they are.
template <std::int64_t COUNT>
__attribute__((always_inline)) inline void add_some(float const* x, std::int64_t stride,
                                                    float const* __restrict weights, std::int64_t k_size,
                                                    std::int64_t n_size, float* __restrict y) {
  std::int64_t k = 0;
  for (; k + 4 <= k_size; k += 4) {
    float const* const row = weights + k * n_size;
    for (std::int64_t n = 0; n < n_size; ++n) {
      for (std::int64_t i = 0; i < COUNT; ++i) {
        float const* const of = x + i * stride + k;
        y[i * n_size + n] +=
            of[0] * row[n] + of[1] * row[n + n_size] + of[2] * row[n + 2 * n_size] + of[3] * row[n + 3 * n_size];
      }
    }
  }
  for (; k < k_size; ++k) {
    for (std::int64_t n = 0; n < n_size; ++n) {
      for (std::int64_t i = 0; i < COUNT; ++i) y[i * n_size + n] += x[i * stride + k] * weights[k * n_size + n];
    }
  }
}

__attribute__((always_inline)) inline void add_rows(Rows const& rows, float const* weights, std::int64_t k_size,
                                                    std::int64_t n_size) {
  std::int64_t row = 0;
  for (; row + 2 <= rows.rows; row += 2) {
    add_some<2>(rows.x + row * rows.stride, rows.stride, weights, k_size, n_size, rows.y + row * n_size);
  }
  if (row == rows.rows) return;
  add_some<1>(rows.x + row * rows.stride, rows.stride, weights, k_size, n_size, rows.y + row * n_size);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) inline void add_rows_avx2(Rows const& rows, float const* weights,
                                                              std::int64_t k_size, std::int64_t n_size) {
  add_rows(rows, weights, k_size, n_size);
}
#endif

inline void add_rows_baseline(Rows const& rows, float const* weights, std::int64_t k_size, std::int64_t n_size) {
  add_rows(rows, weights, k_size, n_size);
}

inline AddRows best_add_rows() {
#if defined(__x86_64__)
  if (cpu().avx2) return add_rows_avx2;
#endif
  return add_rows_baseline;
}

struct Matrix {
  float const* data;
  std::int64_t k_size, n_size;

  std::int64_t chunk() const { return std::max<std::int64_t>(kVectorChunk / std::max<std::int64_t>(n_size, 1), 4); }
  std::int64_t chunks() const { return (k_size + chunk() - 1) / chunk(); }
};

// Vectors [rows, K] times a matrix each, in parallel over chunks of a matrix's rows, each read once. What is added up
// in which order depends neither on the number of threads nor on the other vectors.
class Products {
 public:
  explicit Products(std::size_t rows) : rows_(rows) {}

  void add(float const* x, Matrix const& matrix) {
    products_.push_back({x, matrix, total_, 0});
    total_ += matrix.chunks();
  }

  Status* run(Context* context) {
    std::size_t size = 0;
    for (Product& product : products_) {
      product.sums = size;
      size += rows_ * static_cast<std::size_t>(product.matrix.chunks() * product.matrix.n_size);
    }
    sums_.assign(size, 0.0f);
    if (total_ == 1) {
      chunk(this, 0);
      return nullptr;
    }
    return api.KernelContext_ParallelFor(context, chunk, static_cast<std::size_t>(total_), 0, this);
  }

  // The result of product number `index`, [rows, N].
  float* result(std::size_t index) {
    Product const& product = products_[index];
    std::size_t const size = rows_ * static_cast<std::size_t>(product.matrix.n_size);
    float* const first = sums_.data() + product.sums;
    for (float const* sums = first + size; sums < first + size * static_cast<std::size_t>(product.matrix.chunks());
         sums += size) {
      for (std::size_t n = 0; n < size; ++n) first[n] += sums[n];
    }
    return first;
  }

 private:
  struct Product {
    float const* x;
    Matrix matrix;
    std::int64_t first_chunk;
    std::size_t sums;  // where its chunks' sums begin, [chunks, rows, N]
  };

  static void chunk(void* data, std::size_t index) {
    static AddRows const add_rows_here = best_add_rows();
    Products& all = *static_cast<Products*>(data);
    std::size_t number = 0;
    while (number + 1 < all.products_.size() &&
           static_cast<std::int64_t>(index) >= all.products_[number + 1].first_chunk) {
      ++number;
    }
    Product const& product = all.products_[number];
    Matrix const& matrix = product.matrix;
    std::int64_t const c = static_cast<std::int64_t>(index) - product.first_chunk, start = c * matrix.chunk();
    std::int64_t const k_size = std::min(matrix.chunk(), matrix.k_size - start);
    float* const sums = all.sums_.data() + product.sums + static_cast<std::size_t>(c * matrix.n_size) * all.rows_;
    Rows const rows{product.x + start, sums, matrix.k_size, static_cast<std::int64_t>(all.rows_)};
    add_rows_here(rows, matrix.data + start * matrix.n_size, k_size, matrix.n_size);
  }

  std::size_t const rows_;
  std::vector<Product> products_;
  std::vector<float> sums_;
  std::int64_t total_ = 0;  // chunks
};

}  // namespace tide_ops

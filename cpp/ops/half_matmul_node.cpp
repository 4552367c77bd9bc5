// TideBf16MatMul, TideFp16MatMul and those with a gate: y [.., N] = x [.., K] times the transpose of weights, bfloat16 or
// float16 [N, K]; sums are float32.
#include "half_matmul.h"
#include "nodes.h"
#include "product.h"

namespace tide_ops {
namespace {

constexpr std::int64_t kSplitRows = 16;  // by one thread at a time

class HalfMatMul : public Node {
 public:
  HalfMatMul(HalfFormat format, bool gated) : kernel_(*half_kernel(format)), gated_(gated) {}

  Status* add(Operands const& operands, Run& run) override {
    Tensor x, weights;
    TIDE_RETURN_IF_FAILED(operands.input(0, x));
    TIDE_RETURN_IF_FAILED(operands.input(1, weights));
    if (x.rank < 1 || x.rank > kMaxRank || weights.rank != 2 || weights.dims[1] != x.dims[x.rank - 1]) {
      return invalid("TideBf16MatMul and TideFp16MatMul take x [.., K] and weights [N, K]");
    }
    std::int64_t const k_size = weights.dims[1], stride = SplitRows::stride(k_size);
    Product product{};
    TIDE_RETURN_IF_FAILED(product.make(operands, x, weights.dims[0], gated_));
    if (product.y == nullptr) return nullptr;
    float* const split = product.scratch(run, product.m_size * stride, gated_);
    auto const* const floats = static_cast<float const*>(x.data);
    HalfKernel const& kernel = kernel_;
    std::int64_t const m_size = product.m_size;
    run.add((m_size + kSplitRows - 1) / kSplitRows, [=, &kernel](std::int64_t part) {
      for (std::int64_t m = part * kSplitRows; m < std::min((part + 1) * kSplitRows, m_size); ++m) {
        kernel.split_row(floats + m * k_size, k_size, split + m * stride);
      }
    });
    SplitRows const rows{split, m_size, k_size};
    auto const* const numbers = static_cast<std::uint16_t const*>(weights.data);
    auto const multiply = [=, &kernel, n_size = product.n_size](std::int64_t n, std::int64_t count,
                                                                float* const(&y)[2]) {
      for (int matrix = 0; matrix < 2 && y[matrix] != nullptr; ++matrix) {
        kernel.multiply(rows, numbers + (matrix * n_size + n) * k_size, count, y[matrix], n_size);
      }
    };
    product.add(run, gated_ ? nullptr : numbers, 2 * k_size, 4, multiply);
    return nullptr;
  }

 private:
  HalfKernel const& kernel_;
  bool const gated_;
};

}  // namespace

std::unique_ptr<Node> half_matmul_node(HalfFormat format, bool gated) {
  return std::make_unique<HalfMatMul>(format, gated);
}

}  // namespace tide_ops

// TideInt4MatMul, TideInt8MatMul and those with a gate: y [.., N] = x [.., K], rounded to 8 bits, times the transpose of
// weights: integers [N, blocks, block_size * bits / 8] and scales [N, blocks]. Where there are outliers [R], numbers of
// columns, the last blocks are multiplied by those inputs again; K and R are whole blocks then.
#include <atomic>

#include "nodes.h"
#include "packed_weights.h"
#include "product.h"

namespace tide_ops {
namespace {

constexpr std::int64_t kRoundedRows = 16;  // by one thread at a time

bool are_columns(std::int64_t const* columns, std::int64_t count, std::int64_t k_size, std::int64_t block_size) {
  return k_size % block_size == 0 && count % block_size == 0 &&
         std::all_of(columns, columns + count, [=](std::int64_t column) { return column >= 0 && column < k_size; });
}

class IntegerMatMul : public Node {
 public:
  IntegerMatMul(IntegerFormat format, bool gated) : format_(format), gated_(gated) {}

  Status* add(Operands const& operands, Run& run) override {
    Tensor x, integers, scales, outliers;
    TIDE_RETURN_IF_FAILED(operands.input(0, x));
    TIDE_RETURN_IF_FAILED(operands.input(1, integers));
    TIDE_RETURN_IF_FAILED(operands.input(2, scales));
    TIDE_RETURN_IF_FAILED(operands.input(3, outliers));
    bool const shapes = x.rank >= 1 && x.rank <= kMaxRank && integers.rank == 3 && scales.rank == 2 &&
                        scales.dims[0] == integers.dims[0] && scales.dims[1] == integers.dims[1];
    std::int64_t const k_size = shapes ? x.dims[x.rank - 1] : 0;
    std::int64_t const block_size = shapes ? integers.dims[2] * 8 / bits_of(format_) : 0;
    std::int64_t const again = outliers.rank == 1 ? outliers.dims[0] : 0;
    if (!shapes || !is_block_size(block_size) || (k_size + again + block_size - 1) / block_size != integers.dims[1]) {
      return invalid("TideInt4MatMul and TideInt8MatMul take x [.., K], integers [N, blocks, bytes of a block] and "
                     "scales [N, blocks]");
    }
    auto const* const columns = static_cast<std::int64_t const*>(outliers.data);
    if (again > 0 && checked_ != columns) {  // once: they are weights
      if (!are_columns(columns, again, k_size, block_size)) {
        return invalid("TideInt4OutlierMatMul takes numbers of columns below K, and K and their count are whole blocks");
      }
      checked_ = columns;
    }
    Product product{};
    TIDE_RETURN_IF_FAILED(product.make(operands, x, integers.dims[0], gated_));
    if (product.y == nullptr) return nullptr;
    IntegerWeights const weights{static_cast<std::uint8_t const*>(integers.data),
                                 scales.data,
                                 gated_ ? 2 : 1,
                                 product.n_size,
                                 integers.dims[1],
                                 block_size,
                                 format_,
                                 gated_};
    RoundedInputs inputs{nullptr, weights.blocks, block_size, format_};
    std::int64_t const m_size = product.m_size, n_size = product.n_size;
    // After the rounded rows: of each row, its inputs that are multiplied again.
    std::int64_t const rounded = m_size * inputs.stride() / 4;
    float* const scratch = product.scratch(run, rounded + m_size * again, gated_);
    inputs.rows = reinterpret_cast<char*>(scratch);
    auto const* const floats = static_cast<float const*>(x.data);
    run.add((m_size + kRoundedRows - 1) / kRoundedRows, [=](std::int64_t part) {
      for (std::int64_t m = part * kRoundedRows; m < std::min((part + 1) * kRoundedRows, m_size); ++m) {
        kernel_->round(inputs, floats + m * k_size, k_size, m, 0);
        if (again == 0) continue;
        float* const repeated = scratch + rounded + m * again;
        for (std::int64_t i = 0; i < again; ++i) repeated[i] = floats[m * k_size + columns[i]];
        kernel_->round(inputs, repeated, again, m, k_size / block_size);
      }
    });
    std::shared_ptr<PackedWeights const> const packed = packed_of(weights, kept_, run);
    auto const multiply = [=](std::int64_t n, std::int64_t count, float* const(&y)[2]) {
      std::int64_t const panel = n / PackedWeights::kRows * packed->matrices;
      kernel_->multiply(inputs, m_size, *packed, panel, count, y, n_size);
    };
    product.add(run, packed->panel(0), packed->panel_bytes() / PackedWeights::kRows, PackedWeights::kRows, multiply);
    return nullptr;
  }

 private:
  IntegerKernel const* const kernel_ = integer_kernel();
  IntegerFormat const format_;
  bool const gated_;
  KeptCopy<PackedWeights> kept_;
  std::atomic<std::int64_t const*> checked_{nullptr};  // outliers whose numbers are columns
};

}  // namespace

std::shared_ptr<PackedWeights const> packed_of(IntegerWeights const& weights, KeptCopy<PackedWeights>& kept, Run& run) {
  auto const bytes = static_cast<std::size_t>(weights.matrices * weights.rows * weights.row_bytes());
  auto const key = [&] {
    return WeightKey(weights.integers, bytes,
                     {weights.matrices, weights.rows, weights.blocks, weights.block_size, bits_of(weights.format)});
  };
  auto const pack = [&] {
    auto packed = std::make_shared<PackedWeights>(weights);
    if (Status* const failed = run.now(packed->panels(), [&](std::int64_t panel) { packed->fill(weights, panel); })) {
      api.ReleaseStatus(failed);
      throw std::bad_alloc();
    }
    forget(weights.integers, bytes);
    forget(weights.scales, static_cast<std::size_t>(weights.scales_bytes()));
    return std::shared_ptr<PackedWeights const>(packed);
  };
  return kept.of(weights.integers, key, pack);
}

std::unique_ptr<Node> integer_matmul_node(IntegerFormat format, bool gated) {
  return std::make_unique<IntegerMatMul>(format, gated);
}

}  // namespace tide_ops

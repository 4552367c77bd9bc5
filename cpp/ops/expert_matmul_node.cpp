// TideBf16ExpertMatMul, TideInt4ExpertMatMul and the like: y [.., k, N] = x [.., c, K] times the transpose of the weights of
// the experts [.., k] that each token chose, where c is k, or 1: all of a token's experts read one row. Weights are [E, N, K]
// or, of integers, as those of TideInt4MatMul for each expert. An expert that no token chose is not read. Rows of one expert
// are multiplied together. Numbers of experts that there are not give NaN.
#include <algorithm>
#include <limits>

#include "half_matmul.h"
#include "nodes.h"
#include "packed_weights.h"
#include "product.h"

namespace tide_ops {
namespace {

constexpr std::int64_t kPreparedRows = 4;  // by one thread at a time

// Rows by their expert, in memory of floats that are not read as such.
struct Sorted {
  std::int64_t rows, experts;
  std::int32_t *order, *chosen, *begins;  // [rows]; [rows], the experts that have some; [rows + 1], where theirs begin
  std::int32_t* counts;                   // [experts + 1], while they are sorted

  static std::int64_t floats(std::int64_t rows, std::int64_t experts) { return 3 * rows + experts + 2; }

  Sorted(float* memory, std::int64_t row_count, std::int64_t expert_count)
      : rows(row_count), experts(expert_count), order(reinterpret_cast<std::int32_t*>(memory)), chosen(order + rows),
        begins(chosen + rows), counts(begins + rows + 1) {}

  // The most experts that can be chosen, and one for rows that have none.
  std::int64_t most() const { return std::min(rows, experts + 1); }

  void sort(std::int64_t const* expert) const {
    auto const known = [&](std::int64_t row) {
      return expert[row] >= 0 && expert[row] < experts ? expert[row] : experts;
    };
    std::fill_n(counts, experts + 1, 0);
    for (std::int64_t row = 0; row < rows; ++row) ++counts[known(row)];
    std::int64_t distinct = 0;
    std::int32_t begin = 0;
    for (std::int64_t each = 0; each <= experts; ++each) {
      std::int32_t const count = counts[each];
      counts[each] = begin;
      if (count == 0) continue;
      chosen[distinct] = static_cast<std::int32_t>(each);
      begins[distinct++] = begin;
      begin += count;
    }
    std::fill(begins + distinct, begins + rows + 1, begin);
    for (std::int64_t row = 0; row < rows; ++row) order[counts[known(row)]++] = static_cast<std::int32_t>(row);
  }
};

// A matrix [N, K] of every expert. All weights have these members: of R prepared rows, at `memory`, row `at` is made of x [K];
// and y [m, count], y_stride apart, of m of them from `begin` on and `count` rows of an expert's matrix from row n on.
struct Matrices {
  std::int64_t experts, n_size, k_size;
};

struct HalfMatrices : Matrices {
  HalfKernel const* kernel;
  std::uint16_t const* numbers;

  std::int64_t row_bytes() const { return 2 * k_size; }
  std::int64_t step() const { return 4; }
  std::int64_t prepared_floats() const { return SplitRows::stride(k_size); }  // of a row
  void prepare(float const* x, float* memory, std::int64_t at) const {
    kernel->split_row(x, k_size, memory + at * SplitRows::stride(k_size));
  }
  void multiply(float const* memory, std::int64_t expert, std::int64_t begin, std::int64_t m, std::int64_t n,
                std::int64_t count, float* y, std::int64_t y_stride) const {
    SplitRows const rows{memory + begin * SplitRows::stride(k_size), m, k_size};
    kernel->multiply(rows, numbers + (expert * n_size + n) * k_size, count, y, y_stride);
  }
};

struct IntegerMatrices : Matrices {
  IntegerKernel const* kernel;
  std::shared_ptr<PackedWeights const> packed;

  RoundedInputs inputs(float* memory, std::int64_t row) const {
    RoundedInputs rounded{nullptr, packed->blocks, packed->block_size, packed->format};
    rounded.rows = reinterpret_cast<char*>(memory) + row * rounded.stride();
    return rounded;
  }
  std::int64_t row_bytes() const { return packed->panel_bytes() / PackedWeights::kRows; }
  std::int64_t step() const { return PackedWeights::kRows; }
  std::int64_t prepared_floats() const { return inputs(nullptr, 0).stride() / 4; }
  void prepare(float const* x, float* memory, std::int64_t at) const {
    kernel->round(inputs(memory, at), x, k_size, 0, 0);
  }
  void multiply(float* memory, std::int64_t expert, std::int64_t begin, std::int64_t m, std::int64_t n,
                std::int64_t count, float* y, std::int64_t y_stride) const {
    std::int64_t const panel = expert * packed->panels_of_one() + n / PackedWeights::kRows;
    kernel->multiply(inputs(memory, begin), m, *packed, panel, count, {y, nullptr}, y_stride);
  }
};

// What a node keeps of its weights, and how it reads them.
class HalfReader {
 public:
  explicit HalfReader(HalfFormat format) : kernel_(half_kernel(format)) {}

  Status* read(Operands const& operands, Run&, std::int64_t, HalfMatrices& matrices) {
    Tensor weights;
    TIDE_RETURN_IF_FAILED(operands.input(2, weights));
    if (weights.rank != 3) return invalid("TideBf16ExpertMatMul and TideFp16ExpertMatMul take weights [E, N, K]");
    matrices = {{weights.dims[0], weights.dims[1], weights.dims[2]}, kernel_,
                static_cast<std::uint16_t const*>(weights.data)};
    return nullptr;
  }

 private:
  HalfKernel const* const kernel_;
};

class IntegerReader {
 public:
  explicit IntegerReader(IntegerFormat format) : format_(format) {}

  Status* read(Operands const& operands, Run& run, std::int64_t k_size, IntegerMatrices& matrices) {
    Tensor integers, scales;
    TIDE_RETURN_IF_FAILED(operands.input(2, integers));
    TIDE_RETURN_IF_FAILED(operands.input(3, scales));
    std::int64_t const block_size = integers.rank == 4 ? integers.dims[3] * 8 / bits_of(format_) : 0;
    bool fits = is_block_size(block_size) && scales.rank == 3 &&
                (k_size + block_size - 1) / block_size == integers.dims[2];
    for (std::size_t d = 0; fits && d < 3; ++d) fits = scales.dims[d] == integers.dims[d];
    if (!fits) {
      return invalid("TideInt4ExpertMatMul and the like take integers [E, N, blocks, bytes of a block] and scales [E, N, "
                     "blocks] of K inputs");
    }
    IntegerWeights const weights{static_cast<std::uint8_t const*>(integers.data),
                                 scales.data,
                                 integers.dims[0],
                                 integers.dims[1],
                                 integers.dims[2],
                                 block_size,
                                 format_,
                                 false};
    matrices = {{weights.matrices, weights.rows, k_size}, kernel_, packed_of(weights, kept_, run)};
    return nullptr;
  }

 private:
  IntegerKernel const* const kernel_ = integer_kernel();
  IntegerFormat const format_;
  KeptCopy<PackedWeights> kept_;
};

template <typename Reader, typename Weights>
class ExpertMatMul : public Node {
 public:
  template <typename Format>
  explicit ExpertMatMul(Format format) : reader_(format) {}

  Status* add(Operands const& operands, Run& run) override {
    Tensor x, expert;
    Weights weights;
    TIDE_RETURN_IF_FAILED(operands.input(0, x));
    TIDE_RETURN_IF_FAILED(operands.input(1, expert));
    std::size_t const rank = x.rank;
    TIDE_RETURN_IF_FAILED(reader_.read(operands, run, rank > 0 ? x.dims[rank - 1] : 0, weights));
    bool fits = rank >= 2 && rank <= kMaxRank && expert.rank == rank - 1 && x.dims[rank - 1] == weights.k_size;
    for (std::size_t d = 0; fits && d + 2 < rank; ++d) fits = x.dims[d] == expert.dims[d];
    if (!fits || (x.dims[rank - 2] != 1 && x.dims[rank - 2] != expert.dims[rank - 2])) {
      return invalid("a product by experts takes x [.., c, K] and the experts [.., k] of each token; c is k or 1");
    }
    std::int64_t const k = expert.dims[rank - 2], shared = x.dims[rank - 2] == k ? 1 : k;
    std::int64_t rows = 1;
    for (std::size_t d = 0; d + 1 < rank; ++d) rows *= expert.dims[d];
    x.dims[rank - 2] = k;
    x.dims[rank - 1] = weights.n_size;
    void* made;
    TIDE_RETURN_IF_FAILED(operands.output(0, x.dims, rank, &made));
    if (made == nullptr || rows == 0) return nullptr;
    run.needs_threads();

    std::int64_t const for_order = (Sorted::floats(rows, weights.experts) + 15) / 16 * 16;
    float* const memory = run.scratch(for_order + rows * weights.prepared_floats());
    Sorted const sorted(memory, rows, weights.experts);
    run.add(1, [=, numbers = static_cast<std::int64_t const*>(expert.data)](std::int64_t) { sorted.sort(numbers); });
    float* const prepared = memory + for_order;
    run.add((rows + kPreparedRows - 1) / kPreparedRows, [=, from = data_of(x)](std::int64_t part) {
      for (std::int64_t at = part * kPreparedRows; at < std::min((part + 1) * kPreparedRows, rows); ++at) {
        weights.prepare(from + sorted.order[at] / shared * weights.k_size, prepared, at);
      }
    });
    std::int64_t const step = weights.step();
    std::int64_t const chunk = std::max<std::int64_t>(kChunkBytes / weights.row_bytes() / step, 1) * step;
    std::int64_t const chunks = (weights.n_size + chunk - 1) / chunk;
    run.add(sorted.most() * chunks, [=, y = static_cast<float*>(made)](std::int64_t part) {
      std::int64_t const slot = part / chunks, n = part % chunks * chunk, n_size = weights.n_size;
      std::int64_t const begin = sorted.begins[slot], m = sorted.begins[slot + 1] - begin;
      std::int64_t const count = std::min(chunk, n_size - n);
      std::int32_t const* const order = sorted.order + begin;
      if (m == 0) return;
      if (sorted.chosen[slot] == weights.experts) {
        for (std::int64_t i = 0; i < m; ++i) {
          std::fill_n(y + order[i] * n_size + n, count, std::numeric_limits<float>::quiet_NaN());
        }
      } else if (m == 1) {
        weights.multiply(prepared, sorted.chosen[slot], begin, 1, n, count, y + order[0] * n_size + n, n_size);
      } else {
        static thread_local Buffer kept;
        float* const results = kept.of(m * count);
        weights.multiply(prepared, sorted.chosen[slot], begin, m, n, count, results, count);
        for (std::int64_t i = 0; i < m; ++i) std::copy_n(results + i * count, count, y + order[i] * n_size + n);
      }
    });
    return nullptr;
  }

 private:
  Reader reader_;
};

}  // namespace

std::unique_ptr<Node> half_expert_matmul_node(HalfFormat format) {
  return std::make_unique<ExpertMatMul<HalfReader, HalfMatrices>>(format);
}

std::unique_ptr<Node> integer_expert_matmul_node(IntegerFormat format) {
  return std::make_unique<ExpertMatMul<IntegerReader, IntegerMatrices>>(format);
}

}  // namespace tide_ops

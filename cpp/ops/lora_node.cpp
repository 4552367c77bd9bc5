// TideLora: adds each sequence's low-rank adapter to what a linear layer gives: y + x down up, for the columns of y that the
// layer has. Rows of `weights` are adapters; at `offset` a row holds down [K, rank] and then up [rank, width] of the layer,
// and before them 0 where both are zeros. Row 0 is of sequences without an adapter. What is zero is not read.
#include <algorithm>
#include <memory>
#include <vector>

#include "lora.h"
#include "nodes.h"

namespace tide_ops {
namespace {

constexpr std::int64_t kLoraSplit = 256;    // inputs of a product, summed by one thread at a time
constexpr std::int64_t kLoraColumns = 256;  // outputs, by one thread at a time

struct AdaptedRow {
  std::int64_t row;
  float const* weights;
};

class Lora : public Node {
 public:
  explicit Lora(Attributes const& attributes)
      : offset_(attributes.integer("offset", 0)),
        rank_(attributes.integer("rank", 0)),
        column_(attributes.integer("column", 0)),
        width_(attributes.integer("width", 0)) {}

  Status* add(Operands const& operands, Run& run) override {
    enum { kY, kX, kWeights, kAdapters, kStarts, kInputs };
    Tensor in[kInputs];
    for (std::size_t i = 0; i < kInputs; ++i) TIDE_RETURN_IF_FAILED(operands.input(i, in[i]));
    Tensor const &y = in[kY], &x = in[kX], &weights = in[kWeights], &adapters = in[kAdapters], &starts = in[kStarts];
    if (x.rank < 1 || x.rank != y.rank || !std::equal(x.dims, x.dims + x.rank - 1, y.dims)) return wrong();
    std::int64_t rows = 1, inputs = x.dims[x.rank - 1], outputs = y.dims[y.rank - 1];
    for (std::size_t d = 0; d + 1 < x.rank; ++d) rows *= x.dims[d];
    bool const fits = rank_ > 0 && offset_ >= 1 && column_ >= 0 && width_ > 0 && column_ + width_ <= outputs &&
                      weights.rank == 2 && offset_ + rank_ * (inputs + width_) <= weights.dims[1] &&
                      adapters.rank == 1 &&
                      (starts.data == nullptr ? adapters.dims[0] == 1
                                              : starts.rank == 1 && starts.dims[0] == adapters.dims[0] + 1);
    if (!fits) return wrong();
    std::vector<AdaptedRow> adapted;
    TIDE_RETURN_IF_FAILED(adapted_rows(weights, adapters, starts, rows, adapted));
    void* result;
    TIDE_RETURN_IF_FAILED(operands.output(0, y.dims, y.rank, &result));
    if (result == nullptr) return nullptr;
    auto* const to = static_cast<float*>(result);
    if (result != y.data) {
      float const* const from = data_of(y);
      run.add(1, [=](std::int64_t) { std::copy_n(from, rows * outputs, to); });
    }
    if (adapted.empty()) return nullptr;
    add_product(run, std::move(adapted), data_of(x), inputs, to + column_, outputs);
    return nullptr;
  }

 private:
  // The rows of sequences with an adapter, and its weights.
  Status* adapted_rows(Tensor const& weights, Tensor const& adapters, Tensor const& starts, std::int64_t rows,
                       std::vector<AdaptedRow>& adapted) const {
    auto const* const chosen = static_cast<std::int64_t const*>(adapters.data);
    auto const* const first = static_cast<std::int64_t const*>(starts.data);
    for (std::int64_t i = 0; i < adapters.dims[0]; ++i) {
      std::int64_t const begin = first == nullptr ? 0 : first[i], end = first == nullptr ? rows : first[i + 1];
      if (begin < 0 || begin > end || end > rows) return wrong();
      if (chosen[i] < 0 || chosen[i] >= weights.dims[0]) return invalid("TideLora: a sequence has an adapter that is none");
      if (chosen[i] == 0) continue;
      float const* const own = data_of(weights) + chosen[i] * weights.dims[1] + offset_;
      if (own[-1] == 0) continue;
      for (std::int64_t row = begin; row < end; ++row) adapted.push_back({row, own});
    }
    return nullptr;
  }

  // Parts of the inputs are summed apart, and the sums added in their order, whoever computed them.
  void add_product(Run& run, std::vector<AdaptedRow> adapted, float const* x, std::int64_t inputs, float* y,
                   std::int64_t stride) const {
    auto const all = std::make_shared<std::vector<AdaptedRow> const>(std::move(adapted));
    auto const count = static_cast<std::int64_t>(all->size());
    std::int64_t const splits = (inputs + kLoraSplit - 1) / kLoraSplit, chunks = (width_ + kLoraColumns - 1) / kLoraColumns;
    float* const sums = run.scratch(count * splits * rank_);
    LoraKernel const& kernel = *lora_kernel();
    run.add(count * splits, [=, &kernel, rank = rank_](std::int64_t part) {
      AdaptedRow const& one = (*all)[static_cast<std::size_t>(part / splits)];
      std::int64_t const begin = part % splits * kLoraSplit, size = std::min(kLoraSplit, inputs - begin);
      float* const sum = sums + part * rank;
      std::fill(sum, sum + rank, 0.0f);
      kernel.add(x + one.row * inputs + begin, size, one.weights + begin * rank, rank, rank, sum);
    });
    run.add(count * chunks, [=, &kernel, rank = rank_, width = width_](std::int64_t part) {
      static thread_local Buffer kept;
      float* const low = kept.of(rank);
      float const* const parts = sums + part / chunks * splits * rank;
      std::copy(parts, parts + rank, low);
      for (std::int64_t split = 1; split < splits; ++split) {
        for (std::int64_t r = 0; r < rank; ++r) low[r] += parts[split * rank + r];
      }
      AdaptedRow const& one = (*all)[static_cast<std::size_t>(part / chunks)];
      std::int64_t const begin = part % chunks * kLoraColumns, size = std::min(kLoraColumns, width - begin);
      kernel.add(low, rank, one.weights + inputs * rank + begin, width, size, y + one.row * stride + begin);
    });
    run.needs_threads();
  }

  static Status* wrong() {
    return invalid(
        "TideLora takes y [.., W], x [.., K], weights [A, T], adapters [R] and starts [R + 1], which one sequence needs "
        "not");
  }

  std::int64_t const offset_, rank_, column_, width_;
};

}  // namespace

std::unique_ptr<Node> lora_node(Attributes const& attributes) { return std::make_unique<Lora>(attributes); }

}  // namespace tide_ops

// TideGate: x [.., 2 W] -> SiLU of its first half times the second, [.., W].
#include <algorithm>

#include "elementwise.h"
#include "nodes.h"

namespace tide_ops {
namespace {

constexpr std::int64_t kGateColumns = 1024;  // by one thread at a time

class Gate : public Node {
 public:
  Status* add(Operands const& operands, Run& run) override {
    Tensor x;
    TIDE_RETURN_IF_FAILED(operands.input(0, x));
    if (x.rank == 0 || x.dims[x.rank - 1] % 2 != 0) return invalid("TideGate takes hidden states [.., 2 W]");
    std::int64_t rows = 1, width = x.dims[x.rank - 1] /= 2;
    for (std::size_t d = 0; d + 1 < x.rank; ++d) rows *= x.dims[d];
    void* result;
    TIDE_RETURN_IF_FAILED(operands.output(0, x.dims, x.rank, &result));
    if (result == nullptr) return nullptr;
    float const* const from = data_of(x);
    auto* const to = static_cast<float*>(result);
    std::int64_t const chunks = (width + kGateColumns - 1) / kGateColumns;
    run.add(rows * chunks, [=](std::int64_t part) {
      std::int64_t const row = part / chunks, begin = part % chunks * kGateColumns;
      std::int64_t const size = std::min(kGateColumns, width - begin);
      float const* const gates = from + 2 * row * width + begin;
      float* const y = to + row * width + begin;
      std::copy_n(gates + width, size, y);
      elementwise_kernel()->gate(gates, size, y);
    });
    return nullptr;
  }
};

}  // namespace

std::unique_ptr<Node> gate_node() { return std::make_unique<Gate>(); }

}  // namespace tide_ops

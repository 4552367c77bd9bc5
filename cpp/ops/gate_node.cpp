// TideGate: SiLU(gates) * ups, of states of one shape.
#include <algorithm>

#include "gate.h"
#include "nodes.h"

namespace tide_ops {
namespace {

constexpr std::int64_t kPart = 4096;  // floats, by one thread at a time

class Gate : public Node {
 public:
  Status* add(Operands const& operands, Run& run) override {
    Tensor gates, ups;
    TIDE_RETURN_IF_FAILED(operands.input(0, gates));
    TIDE_RETURN_IF_FAILED(operands.input(1, ups));
    if (gates.rank != ups.rank || !std::equal(gates.dims, gates.dims + gates.rank, ups.dims)) {
      return invalid("TideGate takes states of one shape");
    }
    std::int64_t count = 1;
    for (std::size_t d = 0; d < ups.rank; ++d) count *= ups.dims[d];
    void* result;
    TIDE_RETURN_IF_FAILED(operands.output(0, ups.dims, ups.rank, &result));
    if (result == nullptr) return nullptr;
    float const *const from = data_of(gates), *const other = data_of(ups);
    auto* const to = static_cast<float*>(result);
    run.add((count + kPart - 1) / kPart, [=](std::int64_t part) {
      std::int64_t const begin = part * kPart, size = std::min(kPart, count - begin);
      std::copy_n(other + begin, size, to + begin);
      gate_kernel()->apply(from + begin, size, to + begin);
    });
    return nullptr;
  }
};

}  // namespace

std::unique_ptr<Node> gate_node() { return std::make_unique<Gate>(); }

}  // namespace tide_ops

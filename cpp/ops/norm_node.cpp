// RMSNormalization and LayerNormalization over the last dimension, ONNX Runtime's SkipSimplifiedLayerNormalization and
// SkipLayerNormalization, which add first.
#include "nodes.h"
#include "norm.h"

namespace tide_ops {
namespace {

constexpr std::int64_t kRows = 8;  // by one thread at a time

struct Shape {
  std::int64_t rows, width;
};

Shape shape_of(Tensor const& x) {
  std::int64_t rows = 1;
  for (std::size_t d = 0; d + 1 < x.rank; ++d) rows *= x.dims[d];
  return {rows, x.rank > 0 ? x.dims[x.rank - 1] : 0};
}

bool is_vector(Tensor const& tensor, std::int64_t width) {
  return tensor.rank == 0 || (tensor.rank == 1 && tensor.dims[0] == width);
}

class Norm : public Node {
 public:
  Norm(bool layer, bool skip, Attributes const& attributes)
      : layer_(layer), skip_(skip), epsilon_(attributes.number("epsilon", 1e-5f)) {}

  Status* add(Operands const& operands, Run& run) override {
    // x, skip, scale, (of a layer norm) bias, skip_bias; or x, scale, bias
    Tensor x, skip{}, scale, bias{}, skip_bias{};
    std::size_t next = 0;
    TIDE_RETURN_IF_FAILED(operands.input(next++, x));
    if (skip_) TIDE_RETURN_IF_FAILED(operands.input(next++, skip));
    TIDE_RETURN_IF_FAILED(operands.input(next++, scale));
    if (layer_) TIDE_RETURN_IF_FAILED(operands.input(next++, bias));
    if (skip_) TIDE_RETURN_IF_FAILED(operands.input(next++, skip_bias));
    auto const [rows, width] = shape_of(x);
    bool const alike = !skip_ || (skip.rank == x.rank && std::equal(x.dims, x.dims + x.rank, skip.dims));
    if (!alike || scale.rank != 1 || !is_vector(scale, width) || !is_vector(bias, width) ||
        !is_vector(skip_bias, width)) {
      return invalid("a norm takes hidden states of one shape, and scales and biases of their last dimension");
    }
    void *y, *sum = nullptr;
    TIDE_RETURN_IF_FAILED(operands.output(0, x.dims, x.rank, &y));
    if (skip_) TIDE_RETURN_IF_FAILED(operands.output(3, x.dims, x.rank, &sum));
    NormInputs const first{data_of(x), data_of(skip), data_of(skip_bias), data_of(scale), data_of(bias)};
    auto const normalize = layer_ ? norm_kernel()->layer : norm_kernel()->rms;
    auto const part = [=, rows = rows, width = width, epsilon = epsilon_](std::int64_t index) {
      for (std::int64_t row = index * kRows; row < std::min((index + 1) * kRows, rows); ++row) {
        NormInputs inputs = first;
        inputs.x += row * width;
        if (inputs.skip != nullptr) inputs.skip += row * width;
        normalize(inputs, width, epsilon, sum == nullptr ? nullptr : static_cast<float*>(sum) + row * width,
                  static_cast<float*>(y) + row * width);
      }
    };
    run.add((rows + kRows - 1) / kRows, part);
    return nullptr;
  }

 private:
  bool const layer_, skip_;
  float const epsilon_;
};

}  // namespace

std::unique_ptr<Node> norm_node(bool layer, bool skip, Attributes const& attributes) {
  return std::make_unique<Norm>(layer, skip, attributes);
}

}  // namespace tide_ops

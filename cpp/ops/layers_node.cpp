// TideLayers: the nodes of a graph, run one after another by threads that meet between their phases alone, not between
// operators. layers_program.h has the form in which its attribute lists them.
#include <algorithm>
#include <mutex>
#include <stdexcept>

#include "layers_program.h"
#include "nodes.h"

namespace tide_ops {
namespace {

// The tensors of a run.
struct Tensors {
  Operands const& all;  // of the operator
  std::vector<std::int64_t> const& widths;
  std::vector<Tensor> const& weights;
  std::vector<Tensor> inputs, outputs, hidden;
  std::int64_t rows = 0;
  float* memory = nullptr;  // of hidden states

  Status* make_hidden(std::size_t index, std::int64_t const* dims, std::size_t rank, void** data) {
    std::int64_t count = 1;
    for (std::size_t d = 0; d < rank; ++d) count *= dims[d];
    if (rank > kMaxRank || count > rows * widths[index]) {
      return invalid("TideLayers: hidden states are wider than its attribute says");
    }
    float* at = memory;
    for (std::size_t i = 0; i < index; ++i) at += rows * widths[i];
    *data = at;
    keep(hidden[index], at, dims, rank);
    return nullptr;
  }

  Status* make_output(std::size_t index, std::int64_t const* dims, std::size_t rank, void** data) {
    TIDE_RETURN_IF_FAILED(all.output(index, dims, rank, data));
    keep(outputs[index], *data, dims, rank);
    return nullptr;
  }

 private:
  static void keep(Tensor& tensor, void* data, std::int64_t const* dims, std::size_t rank) {
    tensor.data = data;
    tensor.rank = rank;
    std::copy_n(dims, std::min(rank, kMaxRank), tensor.dims);
  }
};

// Those of one line.
class LineOperands : public Operands {
 public:
  LineOperands(Tensors& tensors, Line const& line) : tensors_(tensors), line_(line) {}

  Status* input(std::size_t index, Tensor& tensor) const override {
    tensor = {};
    if (index >= line_.inputs.size()) return nullptr;
    Operand const& operand = line_.inputs[index];
    if (operand.kind == Operand::kHidden) tensor = tensors_.hidden[operand.index];
    if (operand.kind == Operand::kInput) tensor = tensors_.inputs[operand.index];
    if (operand.kind == Operand::kOutput) tensor = tensors_.outputs[operand.index];
    if (operand.kind == Operand::kWeight) tensor = tensors_.weights[operand.index];
    return nullptr;
  }

  Status* output(std::size_t index, std::int64_t const* dims, std::size_t rank, void** data) const override {
    *data = nullptr;
    if (index >= line_.outputs.size()) return nullptr;
    Operand const& operand = line_.outputs[index];
    if (operand.kind == Operand::kHidden) return tensors_.make_hidden(operand.index, dims, rank, data);
    if (operand.kind == Operand::kOutput) return tensors_.make_output(operand.index, dims, rank, data);
    return nullptr;
  }

 private:
  Tensors& tensors_;
  Line const& line_;
};

class Layers : public Node {
 public:
  explicit Layers(std::string const& text) : program_(program_of(text)) {
    for (Line const& line : program_.lines) {
      nodes_.push_back(node_of(line.name, line.attributes));
      if (nodes_.back() == nullptr) throw std::invalid_argument(line.name);
    }
    for (std::int64_t const width : program_.widths) width_ += width;
  }

  Status* add(Operands const& operands, Run& run) override {
    TIDE_RETURN_IF_FAILED(read_weights(operands));
    Tensors tensors{operands,
                    program_.widths,
                    weights_,
                    std::vector<Tensor>(program_.inputs.size()),
                    std::vector<Tensor>(program_.outputs),
                    std::vector<Tensor>(program_.widths.size())};
    TIDE_RETURN_IF_FAILED(read(operands, program_.inputs, tensors.inputs));
    if (tensors.inputs.empty() || tensors.inputs[0].rank < 3 || tensors.inputs[0].dims[0] != 1) {
      return invalid("TideLayers takes hidden states [1, N, ..] first");
    }
    tensors.rows = tensors.inputs[0].dims[1];
    tensors.memory = run.scratch(tensors.rows * width_, Run::kHidden);
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      TIDE_RETURN_IF_FAILED(nodes_[i]->add(LineOperands(tensors, program_.lines[i]), run));
    }
    return nullptr;
  }

 private:
  static Status* read(Operands const& operands, std::vector<bool> const& which, std::vector<Tensor>& tensors) {
    for (std::size_t i = 0; i < which.size(); ++i) {
      if (which[i]) TIDE_RETURN_IF_FAILED(operands.input(i, tensors[i]));
    }
    return nullptr;
  }

  // Once: they stay where and as they are.
  Status* read_weights(Operands const& operands) {
    std::lock_guard<std::mutex> const lock(mutex_);
    if (!weights_.empty()) return nullptr;
    std::vector<Tensor> weights(program_.weights.size());
    TIDE_RETURN_IF_FAILED(read(operands, program_.weights, weights));
    weights_ = std::move(weights);
    return nullptr;
  }

  Program const program_;
  std::vector<std::unique_ptr<Node>> nodes_;  // of its lines
  std::int64_t width_ = 0;                    // of all hidden states
  std::mutex mutex_;
  std::vector<Tensor> weights_;
};

}  // namespace

std::unique_ptr<Node> layers_node(std::string const& text) { return std::make_unique<Layers>(text); }

}  // namespace tide_ops

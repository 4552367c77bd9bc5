// TideLayers: nodes of a graph, run one after another by threads that meet between their phases alone. Attribute `nodes`
// lists them, a line each, as tide_export/lower/onnxruntime/layers.py writes them:
//
//   slots 576 1536
//   RMSNormalization s0 = i0 w5 epsilon=1e-05
//   TideInt4MatMul s1 = s0 w6 w7 bits=4
//
// i, w and o are inputs, inputs that never change (weights) and outputs of the operator, by number; s are states
// [1, N, ..] between nodes, of the widths that the first line gives; - is absent. N is that of input 0, [1, N, ..].
#include <algorithm>
#include <locale>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>

#include "nodes.h"

namespace tide_ops {
namespace {

struct Operand {
  char kind;
  std::size_t index;
};

// What a line says after its operands.
class WrittenAttributes : public Attributes {
 public:
  void add(std::string const& word) {
    std::size_t const equals = word.find('=');
    if (equals == std::string::npos) throw std::invalid_argument(word);
    values_[word.substr(0, equals)] = word.substr(equals + 1);
  }

  std::int64_t integer(char const* name, std::int64_t otherwise) const override { return read(name, otherwise); }
  float number(char const* name, float otherwise) const override { return read(name, otherwise); }
  std::string text(char const* name) const override { return read(name, std::string()); }

 private:
  template <typename T>
  T read(char const* name, T value) const {
    auto const found = values_.find(name);
    if (found == values_.end()) return value;
    std::istringstream text(found->second);
    text.imbue(std::locale::classic());
    if (!(text >> value)) throw std::invalid_argument(found->second);
    return value;
  }

  std::map<std::string, std::string> values_;
};

struct Line {
  std::unique_ptr<Node> node;
  std::vector<Operand> outputs, inputs;
};

// The tensors of a run.
struct Tensors {
  Operands const& all;
  std::vector<std::int64_t> const& widths;
  std::vector<Tensor> const &weights;
  std::vector<Tensor> inputs, outputs, slots;
  float* memory;  // of slots
  std::int64_t rows;

  Status* slot(std::size_t index, std::int64_t const* dims, std::size_t rank, void** data) {
    std::int64_t count = 1;
    for (std::size_t d = 0; d < rank; ++d) count *= dims[d];
    if (rank > kMaxRank || count > rows * widths[index]) {
      return invalid("TideLayers: states are wider than its attribute says");
    }
    float* at = memory;
    for (std::size_t i = 0; i < index; ++i) at += rows * widths[i];
    Tensor& tensor = slots[index];
    tensor.data = *data = at;
    tensor.rank = rank;
    std::copy_n(dims, rank, tensor.dims);
    return nullptr;
  }
};

class LineOperands : public Operands {
 public:
  LineOperands(Tensors& tensors, Line const& line) : tensors_(tensors), line_(line) {}

  Status* input(std::size_t index, Tensor& tensor) const override {
    tensor = {};
    if (index >= line_.inputs.size()) return nullptr;
    Operand const& operand = line_.inputs[index];
    if (operand.kind == 's') tensor = tensors_.slots[operand.index];
    if (operand.kind == 'i') tensor = tensors_.inputs[operand.index];
    if (operand.kind == 'o') tensor = tensors_.outputs[operand.index];
    if (operand.kind == 'w') tensor = tensors_.weights[operand.index];
    return nullptr;
  }

  Status* output(std::size_t index, std::int64_t const* dims, std::size_t rank, void** data) const override {
    *data = nullptr;
    if (index >= line_.outputs.size()) return nullptr;
    Operand const& operand = line_.outputs[index];
    if (operand.kind == 's') return tensors_.slot(operand.index, dims, rank, data);
    if (operand.kind != 'o') return nullptr;
    TIDE_RETURN_IF_FAILED(tensors_.all.output(operand.index, dims, rank, data));
    Tensor& tensor = tensors_.outputs[operand.index];
    tensor.data = *data;
    tensor.rank = rank;
    std::copy_n(dims, std::min(rank, kMaxRank), tensor.dims);
    return nullptr;
  }

 private:
  Tensors& tensors_;
  Line const& line_;
};

class Layers : public Node {
 public:
  explicit Layers(std::string const& text) {
    std::istringstream lines(text);
    for (std::string written; std::getline(lines, written);) {
      std::istringstream words(written);
      words.imbue(std::locale::classic());
      std::string name;
      words >> name;
      if (name == "slots") {
        for (std::int64_t width; words >> width;) widths_.push_back(width);
      } else {
        lines_.push_back(line_of(name, words));
      }
    }
  }

  Status* add(Operands const& operands, Run& run) override {
    TIDE_RETURN_IF_FAILED(read_weights(operands));
    Tensors tensors{operands, widths_, weights_, std::vector<Tensor>(inputs_.size()), std::vector<Tensor>(outputs_),
                    std::vector<Tensor>(widths_.size()), nullptr, 0};
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      if (inputs_[i]) TIDE_RETURN_IF_FAILED(operands.input(i, tensors.inputs[i]));
    }
    if (tensors.inputs.empty() || tensors.inputs[0].rank < 3 || tensors.inputs[0].dims[0] != 1) {
      return invalid("TideLayers takes states [1, N, ..] first");
    }
    tensors.rows = tensors.inputs[0].dims[1];
    std::int64_t width = 0;
    for (std::int64_t const each : widths_) width += each;
    tensors.memory = run.scratch(tensors.rows * width, Run::kStates);
    for (Line const& line : lines_) TIDE_RETURN_IF_FAILED(line.node->add(LineOperands(tensors, line), run));
    return nullptr;
  }

 private:
  Line line_of(std::string const& name, std::istringstream& words) {
    Line line;
    WrittenAttributes attributes;
    bool outputs = true;
    for (std::string word; words >> word;) {
      if (word == "=") {
        outputs = false;
      } else if (word.find('=') != std::string::npos) {
        attributes.add(word);
      } else {
        (outputs ? line.outputs : line.inputs).push_back(operand_of(word));
      }
    }
    line.node = node_of(name, attributes);
    if (line.node == nullptr) throw std::invalid_argument(name);
    return line;
  }

  Operand operand_of(std::string const& word) {
    constexpr std::size_t kMost = 1 << 16;
    Operand const operand{word[0], word[0] == '-' ? 0 : std::stoul(word.substr(1))};
    bool const known = operand.kind == 's' ? operand.index < widths_.size() : operand.index < kMost;
    if (word.find_first_not_of("-iwos") != (word == "-" ? std::string::npos : 1) || !known) {
      throw std::invalid_argument(word);
    }
    if (operand.kind == 'o') outputs_ = std::max(outputs_, operand.index + 1);
    if (operand.kind != 'i' && operand.kind != 'w') return operand;
    std::vector<bool>& read = operand.kind == 'i' ? inputs_ : constant_;
    if (read.size() <= operand.index) read.resize(operand.index + 1);
    read[operand.index] = true;
    return operand;
  }

  // Once: they stay where and as they are.
  Status* read_weights(Operands const& operands) {
    std::lock_guard<std::mutex> const lock(mutex_);
    if (!weights_.empty()) return nullptr;
    std::vector<Tensor> weights(constant_.size());
    for (std::size_t i = 0; i < constant_.size(); ++i) {
      if (constant_[i]) TIDE_RETURN_IF_FAILED(operands.input(i, weights[i]));
    }
    weights_ = std::move(weights);
    return nullptr;
  }

  std::vector<std::int64_t> widths_;
  std::vector<Line> lines_;
  std::vector<bool> inputs_, constant_;  // which inputs of the operator are read
  std::size_t outputs_ = 0;
  std::mutex mutex_;
  std::vector<Tensor> weights_;
};

}  // namespace

std::unique_ptr<Node> layers_node(std::string const& text) { return std::make_unique<Layers>(text); }

}  // namespace tide_ops

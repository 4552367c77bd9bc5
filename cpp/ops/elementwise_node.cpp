// Sigmoid, Exp, Softplus, Gelu and Clip of each number; Add and Mul of two tensors, of which one may be broadcast to the
// other; ReduceSum of the second to last axis; and Reshape, Split and Slice, which leave numbers as they are. All take hidden
// states [1, N, ..].
#include "elementwise.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <locale>
#include <sstream>

#include "nodes.h"

namespace tide_ops {
namespace {

constexpr std::int64_t kNumbers = 4096;  // by one thread at a time

std::int64_t size_of(Tensor const& x) {
  std::int64_t size = 1;
  for (std::size_t d = 0; d < x.rank; ++d) size *= x.dims[d];
  return size;
}

void softplus(float const* x, std::int64_t count, float* y) {
  for (std::int64_t i = 0; i < count; ++i) y[i] = std::max(x[i], 0.0f) + std::log1p(std::exp(-std::abs(x[i])));
}

using Function = void (*)(float const* x, std::int64_t count, float* y);

class Unary : public Node {
 public:
  explicit Unary(Function function) : function_(function) {}

  Status* add(Operands const& operands, Run& run) override {
    Tensor x;
    void* made;
    TIDE_RETURN_IF_FAILED(operands.input(0, x));
    TIDE_RETURN_IF_FAILED(operands.output(0, x.dims, x.rank, &made));
    std::int64_t const size = size_of(x);
    run.add((size + kNumbers - 1) / kNumbers, [=, from = data_of(x), function = function_](std::int64_t part) {
      std::int64_t const begin = part * kNumbers;
      function(from + begin, std::min(kNumbers, size - begin), static_cast<float*>(made) + begin);
    });
    return nullptr;
  }

 private:
  Function const function_;
};

class Clip : public Node {
 public:
  explicit Clip(Attributes const& attributes)
      : low_(attributes.number("low", -std::numeric_limits<float>::infinity())),
        high_(attributes.number("high", std::numeric_limits<float>::infinity())) {}

  Status* add(Operands const& operands, Run& run) override {
    Tensor x;
    void* made;
    TIDE_RETURN_IF_FAILED(operands.input(0, x));
    TIDE_RETURN_IF_FAILED(operands.output(0, x.dims, x.rank, &made));
    std::int64_t const size = size_of(x);
    run.add((size + kNumbers - 1) / kNumbers, [=, from = data_of(x), low = low_, high = high_](std::int64_t part) {
      auto* const to = static_cast<float*>(made);
      for (std::int64_t i = part * kNumbers; i < std::min((part + 1) * kNumbers, size); ++i) {
        float const bounded = from[i] < low ? low : from[i];  // NaN stays
        to[i] = bounded > high ? high : bounded;
      }
    });
    return nullptr;
  }

 private:
  float const low_, high_;
};

// Two tensors as one shape, and the distance from one number of each to the next along an axis: 0 where it is broadcast.
struct Broadcast {
  std::size_t rank = 0;
  std::int64_t dims[kMaxRank], strides[2][kMaxRank];

  bool of(Tensor const& a, Tensor const& b) {
    rank = std::max<std::size_t>({a.rank, b.rank, 1});
    std::int64_t sizes[2] = {1, 1};
    for (std::size_t d = rank; d-- > 0;) {
      std::int64_t const own[] = {dim(a, d), dim(b, d)};
      if (own[0] != own[1] && own[0] != 1 && own[1] != 1) return false;
      dims[d] = own[0] == 1 ? own[1] : own[0];
      for (int i = 0; i < 2; ++i) {
        strides[i][d] = own[i] == 1 ? 0 : sizes[i];
        sizes[i] *= own[i];
      }
    }
    return true;
  }

  std::int64_t width() const { return dims[rank - 1]; }
  std::int64_t rows() const {
    std::int64_t rows = 1;
    for (std::size_t d = 0; d + 1 < rank; ++d) rows *= dims[d];
    return rows;
  }

  // Where a row of the last axis begins in one of the two.
  std::int64_t begin(int which, std::int64_t row) const {
    std::int64_t at = 0;
    for (std::size_t d = rank - 1; d-- > 0; row /= dims[d]) at += row % dims[d] * strides[which][d];
    return at;
  }

 private:
  std::int64_t dim(Tensor const& x, std::size_t d) const { return d + x.rank < rank ? 1 : x.dims[d + x.rank - rank]; }
};

template <typename Operation>
class Binary : public Node {
 public:
  Status* add(Operands const& operands, Run& run) override {
    Tensor a, b;
    TIDE_RETURN_IF_FAILED(operands.input(0, a));
    TIDE_RETURN_IF_FAILED(operands.input(1, b));
    Broadcast both;
    if (!both.of(a, b)) return invalid("an addition or product of hidden states takes tensors that fit each other");
    void* made;
    TIDE_RETURN_IF_FAILED(operands.output(0, both.dims, both.rank, &made));
    std::int64_t const rows = both.rows(), width = both.width();
    std::int64_t const at_once = std::max<std::int64_t>(kNumbers / std::max<std::int64_t>(width, 1), 1);
    run.add((rows + at_once - 1) / at_once, [=, x = data_of(a), y = data_of(b)](std::int64_t part) {
      for (std::int64_t row = part * at_once; row < std::min((part + 1) * at_once, rows); ++row) {
        float const *const first = x + both.begin(0, row), *const second = y + both.begin(1, row);
        float* const to = static_cast<float*>(made) + row * width;
        bool const each[] = {both.strides[0][both.rank - 1] != 0, both.strides[1][both.rank - 1] != 0};
        if (each[0] && each[1]) {
          for (std::int64_t d = 0; d < width; ++d) to[d] = Operation()(first[d], second[d]);
        } else {
          for (std::int64_t d = 0; d < width; ++d) to[d] = Operation()(first[each[0] ? d : 0], second[each[1] ? d : 0]);
        }
      }
    });
    return nullptr;
  }
};

// The numbers of an attribute: "32,16".
std::vector<std::int64_t> numbers_of(std::string text) {
  std::replace(text.begin(), text.end(), ',', ' ');
  std::istringstream words(text);
  words.imbue(std::locale::classic());
  std::vector<std::int64_t> numbers;
  for (std::int64_t number; words >> number;) numbers.push_back(number);
  return numbers;
}

// [1, N, ..] as [1, N, shape ..]; in place where input and output are one.
class Reshape : public Node {
 public:
  explicit Reshape(Attributes const& attributes) : shape_(numbers_of(attributes.text("shape"))) {}

  Status* add(Operands const& operands, Run& run) override {
    Tensor x;
    TIDE_RETURN_IF_FAILED(operands.input(0, x));
    std::int64_t dims[kMaxRank] = {1, x.dims[1]}, rest = 1, wanted = 1;
    for (std::size_t d = 2; d < x.rank; ++d) rest *= x.dims[d];
    for (std::int64_t const each : shape_) wanted *= each;
    if (x.rank < 3 || shape_.size() + 2 > kMaxRank || wanted != rest) return invalid("a shape does not fit the hidden states");
    std::copy(shape_.begin(), shape_.end(), dims + 2);
    void* made;
    TIDE_RETURN_IF_FAILED(operands.output(0, dims, shape_.size() + 2, &made));
    if (made == x.data) return nullptr;
    std::int64_t const size = x.dims[1] * rest;
    run.add((size + kNumbers - 1) / kNumbers, [=, from = data_of(x)](std::int64_t part) {
      std::int64_t const begin = part * kNumbers;
      std::copy_n(from + begin, std::min(kNumbers, size - begin), static_cast<float*>(made) + begin);
    });
    return nullptr;
  }

 private:
  std::vector<std::int64_t> const shape_;
};

// Of the last axis.
class Split : public Node {
 public:
  explicit Split(Attributes const& attributes) : sizes_(numbers_of(attributes.text("sizes"))) {}

  Status* add(Operands const& operands, Run& run) override {
    Tensor x;
    TIDE_RETURN_IF_FAILED(operands.input(0, x));
    std::int64_t width = 0;
    for (std::int64_t const size : sizes_) width += size;
    if (x.rank == 0 || width == 0 || x.dims[x.rank - 1] != width) return invalid("a split does not fit the hidden states");
    std::int64_t const rows = size_of(x) / width;
    std::int64_t const at_once = std::max<std::int64_t>(kNumbers / width, 1);
    float const* from = data_of(x);
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      std::int64_t const size = x.dims[x.rank - 1] = sizes_[i];
      void* made;
      TIDE_RETURN_IF_FAILED(operands.output(i, x.dims, x.rank, &made));
      if (made != nullptr) {
        run.add((rows + at_once - 1) / at_once, [=](std::int64_t part) {
          for (std::int64_t row = part * at_once; row < std::min((part + 1) * at_once, rows); ++row) {
            std::copy_n(from + row * width, size, static_cast<float*>(made) + row * size);
          }
        });
      }
      from += size;
    }
    return nullptr;
  }

 private:
  std::vector<std::int64_t> const sizes_;
};

// Every `step`-th number of the last axis.
class Slice : public Node {
 public:
  explicit Slice(Attributes const& attributes)
      : start_(attributes.integer("start", 0)), step_(attributes.integer("step", 1)) {}

  Status* add(Operands const& operands, Run& run) override {
    Tensor x;
    TIDE_RETURN_IF_FAILED(operands.input(0, x));
    std::int64_t const width = x.rank > 0 ? x.dims[x.rank - 1] : 0;
    if (start_ < 0 || start_ >= width || step_ < 1) return invalid("a slice does not fit the hidden states");
    std::int64_t const rows = size_of(x) / width, size = x.dims[x.rank - 1] = (width - start_ + step_ - 1) / step_;
    void* made;
    TIDE_RETURN_IF_FAILED(operands.output(0, x.dims, x.rank, &made));
    std::int64_t const at_once = std::max<std::int64_t>(kNumbers / size, 1);
    run.add((rows + at_once - 1) / at_once, [=, from = data_of(x) + start_, step = step_](std::int64_t part) {
      for (std::int64_t row = part * at_once; row < std::min((part + 1) * at_once, rows); ++row) {
        float* const to = static_cast<float*>(made) + row * size;
        for (std::int64_t i = 0; i < size; ++i) to[i] = from[row * width + i * step];
      }
    });
    return nullptr;
  }

 private:
  std::int64_t const start_, step_;
};

// Of the second to last axis, which is gone then.
class ReduceSum : public Node {
 public:
  Status* add(Operands const& operands, Run& run) override {
    Tensor x;
    TIDE_RETURN_IF_FAILED(operands.input(0, x));
    if (x.rank < 2) return invalid("a sum takes hidden states of two axes at least");
    std::int64_t const added = x.dims[x.rank - 2], width = x.dims[x.rank - 2] = x.dims[x.rank - 1];
    void* made;
    TIDE_RETURN_IF_FAILED(operands.output(0, x.dims, x.rank - 1, &made));
    --x.rank;
    std::int64_t const rows = width > 0 ? size_of(x) / width : 0;
    run.add(rows, [=, from = data_of(x)](std::int64_t row) {
      float* const to = static_cast<float*>(made) + row * width;
      std::fill_n(to, width, 0.0f);
      for (std::int64_t i = 0; i < added; ++i) {
        float const* const each = from + (row * added + i) * width;
        for (std::int64_t d = 0; d < width; ++d) to[d] += each[d];
      }
    });
    return nullptr;
  }
};

}  // namespace

std::unique_ptr<Node> elementwise_node(std::string const& name, Attributes const& attributes) {
  if (name == "Sigmoid") return std::make_unique<Unary>(elementwise_kernel()->sigmoid);
  if (name == "Exp") return std::make_unique<Unary>(elementwise_kernel()->exponential);
  if (name == "Gelu") {
    bool const tanh = attributes.text("approximate") == "tanh";
    return std::make_unique<Unary>(tanh ? elementwise_kernel()->tanh_gelu : elementwise_kernel()->gelu);
  }
  if (name == "Softplus") return std::make_unique<Unary>(softplus);
  if (name == "Add") return std::make_unique<Binary<std::plus<float>>>();
  if (name == "Mul") return std::make_unique<Binary<std::multiplies<float>>>();
  if (name == "Reshape") return std::make_unique<Reshape>(attributes);
  if (name == "Clip") return std::make_unique<Clip>(attributes);
  if (name == "Slice") return std::make_unique<Slice>(attributes);
  if (name == "ReduceSum") return std::make_unique<ReduceSum>();
  return name == "Split" ? std::make_unique<Split>(attributes) : nullptr;
}

}  // namespace tide_ops

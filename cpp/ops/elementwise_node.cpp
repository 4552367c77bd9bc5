// Sigmoid, Exp, Softplus and Gelu of each number; Add and Mul of two tensors, of which one may be broadcast to the other; and
// Reshape and Split, which leave numbers as they are. All take states [1, N, ..].
#include "elementwise.h"

#include <algorithm>
#include <cmath>
#include <functional>
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
    if (!both.of(a, b)) return invalid("an addition or product of states takes tensors that fit each other");
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
    if (x.rank < 3 || shape_.size() + 2 > kMaxRank || wanted != rest) return invalid("a shape does not fit the states");
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
    if (x.rank == 0 || width == 0 || x.dims[x.rank - 1] != width) return invalid("a split does not fit the states");
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
  return name == "Split" ? std::make_unique<Split>(attributes) : nullptr;
}

}  // namespace tide_ops

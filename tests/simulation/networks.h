// The networks of a bundle of the table (table.h), as ONNX Runtime would run them on the tensors that are bound.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace table {

constexpr int kFloat = 1, kInt32 = 6, kInt64 = 7;

struct Tensor {
  std::vector<std::int64_t> shape;
  int type = kFloat;
  void* data = nullptr;
  std::shared_ptr<std::vector<char>> own;  // memory of its own, if it has any
};

std::size_t bytes_of(std::vector<std::int64_t> const& shape, int type);

// An input or output of a network; a dimension of -1 is free.
struct Info {
  std::string name;
  int type;
  std::vector<std::int64_t> shape;
};

// What a run reads and writes, by name.
class Bound {
 public:
  struct Entry {
    std::string name;
    Tensor tensor;
    bool device = false;  // an output without memory: the run makes it
  };
  std::vector<Entry> inputs, outputs;

  Tensor const& in(std::string const& name) const;

  template <typename T>
  T const* read(std::string const& name) const {
    return static_cast<T const*>(in(name).data);
  }

  // The memory of an output, which is to have this shape; null: it is not bound.
  float* write(std::string const& name, std::vector<std::int64_t> const& shape);
};

class Network {
 public:
  // text: "segment K", "head" or "drafter", and "recurrent" if the model keeps recurrent states.
  explicit Network(std::string const& text);

  void run(Bound& bound) const;

  std::vector<Info> inputs, outputs;

 private:
  struct Row;
  std::vector<Row> rows_of(Bound const& bound) const;
  void segment(Bound& bound, std::int64_t k, std::vector<Row> const& rows, float const* input, float* output) const;
  void run_segment(Bound& bound) const;
  void run_head(Bound& bound) const;
  void run_drafter(Bound& bound) const;

  std::string kind_;
  std::int64_t k_ = 0;
  bool recurrent_ = false;
};

}  // namespace table

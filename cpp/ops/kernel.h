// What the kernels of all operators share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "onnxruntime_abi.h"

namespace tide_ops {

using abi::Context;
using abi::Operator;
using abi::Status;
using abi::Value;

constexpr std::size_t kMaxRank = 8;

extern abi::Api api;  // set when the operators are registered

#define TIDE_RETURN_IF_FAILED(call) \
  if (Status* const status = (call)) return status

struct Tensor {
  void* data;
  std::int64_t dims[kMaxRank];
  std::size_t rank;
};

// An input that is absent has no data and rank 0.
inline Status* input_of(Context* context, std::size_t index, Tensor& tensor) {
  Value const* value;
  abi::Shape* shape;
  TIDE_RETURN_IF_FAILED(api.KernelContext_GetInput(context, index, &value));
  if (value == nullptr) {
    tensor = {};
    return nullptr;
  }
  TIDE_RETURN_IF_FAILED(api.GetTensorMutableData(const_cast<Value*>(value), &tensor.data));
  TIDE_RETURN_IF_FAILED(api.GetTensorTypeAndShape(value, &shape));
  Status* status = api.GetDimensionsCount(shape, &tensor.rank);
  if (status == nullptr && tensor.rank <= kMaxRank) status = api.GetDimensions(shape, tensor.dims, tensor.rank);
  api.ReleaseTensorTypeAndShapeInfo(shape);
  return status;
}

// Memory for floats, aligned to cache lines; what was in it is lost when it grows.
class Buffer {
 public:
  float* of(std::int64_t count) {
    if (count > size_) {
      floats_.reset(static_cast<float*>(::operator new(4 * static_cast<std::size_t>(count), std::align_val_t{64})));
      size_ = count;
    }
    return floats_.get();
  }

 private:
  struct Free {
    void operator()(float* floats) const { ::operator delete(floats, std::align_val_t{64}); }
  };
  std::unique_ptr<float, Free> floats_;
  std::int64_t size_ = 0;
};

// An operator for tensors in the CPU's memory; its name, types and kernel are missing.
inline Operator cpu_operator() {
  Operator op{};
  op.version = abi::kVersion;
  op.GetExecutionProviderType = [](Operator const*) -> char const* { return nullptr; };  // the CPU's
  auto const zero = [](Operator const*, std::size_t) { return 0; };  // required; in the CPU's memory
  op.GetInputCharacteristic = op.GetOutputCharacteristic = op.GetInputMemoryType = zero;
  auto const one = [](Operator const*) { return 1; };
  op.GetVariadicInputMinArity = op.GetVariadicOutputMinArity = one;
  op.GetVariadicInputHomogeneity = op.GetVariadicOutputHomogeneity = op.GetStartVersion = op.GetEndVersion = one;
  return op;
}

}  // namespace tide_ops

// What the kernels of all operators share.
#pragma once

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

inline Status* input_of(Context* context, std::size_t index, Tensor& tensor) {
  Value const* value;
  abi::Shape* shape;
  TIDE_RETURN_IF_FAILED(api.KernelContext_GetInput(context, index, &value));
  TIDE_RETURN_IF_FAILED(api.GetTensorMutableData(const_cast<Value*>(value), &tensor.data));
  TIDE_RETURN_IF_FAILED(api.GetTensorTypeAndShape(value, &shape));
  Status* status = api.GetDimensionsCount(shape, &tensor.rank);
  if (status == nullptr && tensor.rank <= kMaxRank) status = api.GetDimensions(shape, tensor.dims, tensor.rank);
  api.ReleaseTensorTypeAndShapeInfo(shape);
  return status;
}

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

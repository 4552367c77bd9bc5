#include "onnxruntime/operators.h"

#include <cstddef>

#include "../../ops/operators.h"

namespace tide {
namespace {

namespace abi = tide_ops::abi;

#define TIDE_SAME_FUNCTION(name) \
  static_assert(offsetof(OrtApi, name) == sizeof(void*) * decltype(abi::Api::name)::position, #name)
TIDE_SAME_FUNCTION(CreateStatus);
TIDE_SAME_FUNCTION(CreateCustomOpDomain);
TIDE_SAME_FUNCTION(CustomOpDomain_Add);
TIDE_SAME_FUNCTION(AddCustomOpDomain);
TIDE_SAME_FUNCTION(GetTensorMutableData);
TIDE_SAME_FUNCTION(GetDimensionsCount);
TIDE_SAME_FUNCTION(GetDimensions);
TIDE_SAME_FUNCTION(GetTensorTypeAndShape);
TIDE_SAME_FUNCTION(KernelInfoGetAttribute_float);
TIDE_SAME_FUNCTION(KernelInfoGetAttribute_int64);
TIDE_SAME_FUNCTION(KernelInfoGetAttribute_string);
TIDE_SAME_FUNCTION(KernelContext_GetInputCount);
TIDE_SAME_FUNCTION(KernelContext_GetInput);
TIDE_SAME_FUNCTION(KernelContext_GetOutput);
TIDE_SAME_FUNCTION(ReleaseStatus);
TIDE_SAME_FUNCTION(ReleaseTensorTypeAndShapeInfo);
TIDE_SAME_FUNCTION(KernelContext_ParallelFor);

#define TIDE_SAME_MEMBER(name) static_assert(offsetof(OrtCustomOp, name) == offsetof(abi::Operator, name), #name)
TIDE_SAME_MEMBER(GetName);
TIDE_SAME_MEMBER(GetInputType);
TIDE_SAME_MEMBER(GetOutputTypeCount);
TIDE_SAME_MEMBER(KernelDestroy);
TIDE_SAME_MEMBER(GetInputCharacteristic);
TIDE_SAME_MEMBER(GetOutputCharacteristic);
TIDE_SAME_MEMBER(GetInputMemoryType);
TIDE_SAME_MEMBER(GetVariadicOutputHomogeneity);
TIDE_SAME_MEMBER(CreateKernelV2);
TIDE_SAME_MEMBER(KernelComputeV2);
TIDE_SAME_MEMBER(GetEndVersion);
static_assert(sizeof(OrtCustomOp) >= sizeof(abi::Operator));
static_assert(int{ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT} == abi::kFloat);
static_assert(int{ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL} == abi::kBool && int{INPUT_OUTPUT_VARIADIC} == abi::kVariadic);
static_assert(int{ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8} == abi::kUInt8);
static_assert(int{ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16} == abi::kFloat16);
static_assert(int{ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16} == abi::kBFloat16);
static_assert(int{ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8} == abi::kInt8);
static_assert(int{ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32} == abi::kInt32);
static_assert(int{ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64} == abi::kInt64);
static_assert(int{ORT_INVALID_ARGUMENT} == abi::kInvalidArgument);
static_assert(INPUT_OUTPUT_REQUIRED == 0 && int{INPUT_OUTPUT_OPTIONAL} == abi::kOptional && OrtMemTypeDefault == 0);

}  // namespace

void register_operators(Ort::SessionOptions& options) {
  OrtSessionOptions* const native = options;
  Ort::ThrowOnError(reinterpret_cast<OrtStatus*>(
      tide_ops::register_operators(reinterpret_cast<abi::SessionOptions*>(native),
                                   reinterpret_cast<abi::ApiBase const*>(OrtGetApiBase()))));
}

}  // namespace tide

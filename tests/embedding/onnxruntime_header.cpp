// Compares what cpp/ declares of ONNX Runtime's C interface with the real header; it only compiles if all is the same.
#include <onnxruntime_c_api.h>

#include <cstddef>
#include <type_traits>

#include "../../cpp/src/onnxruntime/functions.h"

namespace {

namespace abi = tide_ops::abi;

template <typename>
constexpr std::size_t kArguments = 0;
template <typename Result, typename... Arguments>
constexpr std::size_t kArguments<Result (*)(Arguments...)> = sizeof...(Arguments);
template <typename Result, typename... Arguments>
constexpr std::size_t kArguments<Result (*)(Arguments...) noexcept> = sizeof...(Arguments);
template <int position, typename Signature>
constexpr std::size_t kArguments<abi::Entry<position, Signature>> = kArguments<Signature*>;

#define SAME_FUNCTION(name, entry)                                                   \
  static_assert(offsetof(OrtApi, name) == sizeof(void*) * entry::position, #name);   \
  static_assert(kArguments<decltype(OrtApi::name)> == kArguments<entry>, #name);
#define OF_OPERATORS(name) SAME_FUNCTION(name, std::remove_const_t<decltype(abi::Api::name)>)
OF_OPERATORS(CreateStatus)
OF_OPERATORS(CreateCustomOpDomain)
OF_OPERATORS(CustomOpDomain_Add)
OF_OPERATORS(AddCustomOpDomain)
OF_OPERATORS(GetTensorMutableData)
OF_OPERATORS(GetDimensionsCount)
OF_OPERATORS(GetDimensions)
OF_OPERATORS(GetTensorTypeAndShape)
OF_OPERATORS(KernelInfoGetAttribute_float)
OF_OPERATORS(KernelInfoGetAttribute_int64)
OF_OPERATORS(KernelInfoGetAttribute_string)
OF_OPERATORS(KernelContext_GetInputCount)
OF_OPERATORS(KernelContext_GetInput)
OF_OPERATORS(KernelContext_GetOutput)
OF_OPERATORS(ReleaseStatus)
OF_OPERATORS(ReleaseTensorTypeAndShapeInfo)
OF_OPERATORS(KernelContext_GetGPUComputeStream)
OF_OPERATORS(KernelContext_ParallelFor)
#define OF_THE_RUNTIME(name, position, ...) SAME_FUNCTION(name, std::remove_const_t<decltype(Ort::Functions::name)>)
TIDE_ORT_FUNCTIONS(OF_THE_RUNTIME)

#define SAME_MEMBER(name) static_assert(offsetof(OrtCustomOp, name) == offsetof(abi::Operator, name), #name);
SAME_MEMBER(GetName)
SAME_MEMBER(GetInputType)
SAME_MEMBER(GetOutputTypeCount)
SAME_MEMBER(KernelDestroy)
SAME_MEMBER(GetInputCharacteristic)
SAME_MEMBER(GetOutputCharacteristic)
SAME_MEMBER(GetInputMemoryType)
SAME_MEMBER(GetVariadicOutputHomogeneity)
SAME_MEMBER(CreateKernelV2)
SAME_MEMBER(KernelComputeV2)
SAME_MEMBER(GetEndVersion)
static_assert(sizeof(OrtCustomOp) >= sizeof(abi::Operator));

#define SAME_NUMBER(ours, theirs) static_assert((ours) == static_cast<int>(theirs), #theirs);
SAME_NUMBER(abi::kFloat, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT)
SAME_NUMBER(abi::kUInt8, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8)
SAME_NUMBER(abi::kInt8, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8)
SAME_NUMBER(Ort::kInt16, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16)
SAME_NUMBER(abi::kInt32, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32)
SAME_NUMBER(abi::kInt64, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64)
SAME_NUMBER(abi::kBool, ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL)
SAME_NUMBER(abi::kFloat16, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16)
SAME_NUMBER(Ort::kDouble, ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE)
SAME_NUMBER(abi::kBFloat16, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16)
SAME_NUMBER(abi::kInvalidArgument, ORT_INVALID_ARGUMENT)
SAME_NUMBER(abi::kOptional, INPUT_OUTPUT_OPTIONAL)
SAME_NUMBER(abi::kVariadic, INPUT_OUTPUT_VARIADIC)
SAME_NUMBER(0, INPUT_OUTPUT_REQUIRED)
SAME_NUMBER(Ort::kDeviceAllocator, OrtDeviceAllocator)
SAME_NUMBER(Ort::kDefaultMemory, OrtMemTypeDefault)
SAME_NUMBER(Ort::kFatal, ORT_LOGGING_LEVEL_FATAL)
SAME_NUMBER(Ort::kTensor, ONNX_TYPE_TENSOR)

}  // namespace

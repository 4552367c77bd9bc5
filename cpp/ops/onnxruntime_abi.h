// The parts of ONNX Runtime's C interface that the operators use, so that they compile with a compiler alone: the wheel
// of ONNX Runtime has no headers. That interface only grows: the positions in its table and in an operator do not
// change. tests/embedding/onnxruntime_header.cpp compares them with onnxruntime_c_api.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tide_ops::abi {

struct Status;
struct Value;
struct Shape;  // OrtTensorTypeAndShapeInfo
struct Context;
struct Domain;
struct SessionOptions;

using Function = void (*)();
using Parallel = void (*)(void* data, std::size_t index);

constexpr std::uint32_t kVersion = 18;  // of the interface; onnxruntime 1.18 and all later ones have it
constexpr int kInvalidArgument = 2;     // OrtErrorCode
// ONNXTensorElementDataType
constexpr int kFloat = 1, kUInt8 = 2, kInt8 = 3, kInt32 = 6, kInt64 = 7, kBool = 9, kFloat16 = 10,
              kBFloat16 = 16;
constexpr int kOptional = 1, kVariadic = 2;  // OrtCustomOpInputOutputCharacteristic

// A function of OrtApi by its position.
template <int kPosition, typename Signature>
struct Entry;
template <int kPosition, typename Result, typename... Arguments>
struct Entry<kPosition, Result(Arguments...)> {
  static constexpr int position = kPosition;
  Function const* const* table;
  Result operator()(Arguments... arguments) const {
    return reinterpret_cast<Result (*)(Arguments...)>((*table)[kPosition])(arguments...);
  }
};

// What the operators call, under the names of OrtApi.
class Api {
 public:
  void set(Function const* table) { table_ = table; }
  explicit operator bool() const { return table_ != nullptr; }

 private:
  Function const* table_ = nullptr;  // before the entries, which point to it

 public:
  Entry<0, Status*(int, char const*)> const CreateStatus{&table_};
  Entry<26, Status*(char const*, Domain**)> const CreateCustomOpDomain{&table_};
  Entry<27, Status*(Domain*, void const*)> const CustomOpDomain_Add{&table_};
  Entry<28, Status*(SessionOptions*, Domain*)> const AddCustomOpDomain{&table_};
  Entry<51, Status*(Value*, void**)> const GetTensorMutableData{&table_};
  Entry<61, Status*(Shape const*, std::size_t*)> const GetDimensionsCount{&table_};
  Entry<62, Status*(Shape const*, std::int64_t*, std::size_t)> const GetDimensions{&table_};
  Entry<65, Status*(Value const*, Shape**)> const GetTensorTypeAndShape{&table_};
  Entry<85, Status*(void const*, char const*, float*)> const KernelInfoGetAttribute_float{&table_};
  Entry<86, Status*(void const*, char const*, std::int64_t*)> const KernelInfoGetAttribute_int64{&table_};
  Entry<87, Status*(void const*, char const*, char*, std::size_t*)> const KernelInfoGetAttribute_string{&table_};
  Entry<88, Status*(Context const*, std::size_t*)> const KernelContext_GetInputCount{&table_};
  Entry<90, Status*(Context const*, std::size_t, Value const**)> const KernelContext_GetInput{&table_};
  Entry<91, Status*(Context*, std::size_t, std::int64_t const*, std::size_t, Value**)> const KernelContext_GetOutput{
      &table_};
  Entry<93, void(Status*)> const ReleaseStatus{&table_};
  Entry<99, void(Shape*)> const ReleaseTensorTypeAndShapeInfo{&table_};
  Entry<193, Status*(Context const*, void**)> const KernelContext_GetGPUComputeStream{&table_};
  Entry<274, Status*(Context const*, Parallel, std::size_t, std::size_t, void*)> const KernelContext_ParallelFor{
      &table_};
};

struct ApiBase {
  Function const* (*GetApi)(std::uint32_t version);
  char const* (*GetVersionString)();
};

// OrtCustomOp.
struct Operator {
  std::uint32_t version;
  Function CreateKernel;
  char const* (*GetName)(Operator const*);
  char const* (*GetExecutionProviderType)(Operator const*);
  int (*GetInputType)(Operator const*, std::size_t);
  std::size_t (*GetInputTypeCount)(Operator const*);
  int (*GetOutputType)(Operator const*, std::size_t);
  std::size_t (*GetOutputTypeCount)(Operator const*);
  Function KernelCompute;
  void (*KernelDestroy)(void*);
  int (*GetInputCharacteristic)(Operator const*, std::size_t);
  int (*GetOutputCharacteristic)(Operator const*, std::size_t);
  int (*GetInputMemoryType)(Operator const*, std::size_t);
  int (*GetVariadicInputMinArity)(Operator const*);
  int (*GetVariadicInputHomogeneity)(Operator const*);
  int (*GetVariadicOutputMinArity)(Operator const*);
  int (*GetVariadicOutputHomogeneity)(Operator const*);
  Status* (*CreateKernelV2)(Operator const*, void const* api, void const* info, void** kernel);
  Status* (*KernelComputeV2)(void*, Context*);
  Function InferOutputShapeFn;
  int (*GetStartVersion)(Operator const*);
  int (*GetEndVersion)(Operator const*);
  Function GetMayInplace, ReleaseMayInplace, GetAliasMap, ReleaseAliasMap;
};

}  // namespace tide_ops::abi

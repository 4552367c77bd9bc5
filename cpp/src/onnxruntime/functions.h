// Declares the functions of ONNX Runtime's C interface that the runtime calls, by their positions in its table, because the
// wheel of ONNX Runtime has no headers. The table, in onnxruntime_c_api.h, only grows: positions do not change.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../ops/onnxruntime_abi.h"

namespace Ort {

namespace abi = tide_ops::abi;

struct RawEnv;
struct RawSession;
struct RawRunOptions;
struct RawMemory;
struct RawTypeInfo;
struct RawMetadata;
struct RawBinding;
struct RawAllocator;
struct RawCuda;           // OrtCUDAProviderOptionsV2
struct RawPackedWeights;  // OrtPrepackedWeightsContainer
using RawOptions = abi::SessionOptions;
using RawStatus = abi::Status;
using RawValue = abi::Value;
using RawShape = abi::Shape;

// X(name, position, signature)
#define TIDE_ORT_FUNCTIONS(X)                                                                                      \
  X(GetErrorMessage, 2, char const*(RawStatus const*))                                                             \
  X(CreateEnv, 3, RawStatus*(int, char const*, RawEnv**))                                                          \
  X(Run, 9, RawStatus*(RawSession*, RawRunOptions const*, char const* const*, RawValue const* const*, std::size_t, \
                       char const* const*, std::size_t, RawValue**))                                               \
  X(CreateSessionOptions, 10, RawStatus*(RawOptions**))                                                            \
  X(SetSessionLogSeverityLevel, 22, RawStatus*(RawOptions*, int))                                                  \
  X(SetIntraOpNumThreads, 24, RawStatus*(RawOptions*, int))                                                        \
  X(SessionGetInputCount, 30, RawStatus*(RawSession const*, std::size_t*))                                         \
  X(SessionGetOutputCount, 31, RawStatus*(RawSession const*, std::size_t*))                                        \
  X(SessionGetInputTypeInfo, 33, RawStatus*(RawSession const*, std::size_t, RawTypeInfo**))                        \
  X(SessionGetOutputTypeInfo, 34, RawStatus*(RawSession const*, std::size_t, RawTypeInfo**))                       \
  X(SessionGetInputName, 36, RawStatus*(RawSession const*, std::size_t, RawAllocator*, char**))                    \
  X(SessionGetOutputName, 37, RawStatus*(RawSession const*, std::size_t, RawAllocator*, char**))                   \
  X(CreateRunOptions, 39, RawStatus*(RawRunOptions**))                                                             \
  X(CreateTensorWithDataAsOrtValue, 49,                                                                            \
    RawStatus*(RawMemory const*, void*, std::size_t, std::int64_t const*, std::size_t, int, RawValue**))           \
  X(GetTensorMutableData, 51, RawStatus*(RawValue*, void**))                                                       \
  X(CastTypeInfoToTensorInfo, 55, RawStatus*(RawTypeInfo const*, RawShape const**))                                \
  X(GetOnnxTypeFromTypeInfo, 56, RawStatus*(RawTypeInfo const*, int*))                                             \
  X(GetTensorElementType, 60, RawStatus*(RawShape const*, int*))                                                   \
  X(GetDimensionsCount, 61, RawStatus*(RawShape const*, std::size_t*))                                             \
  X(GetDimensions, 62, RawStatus*(RawShape const*, std::int64_t*, std::size_t))                                    \
  X(GetSymbolicDimensions, 63, RawStatus*(RawShape const*, char const**, std::size_t))                             \
  X(GetTensorTypeAndShape, 65, RawStatus*(RawValue const*, RawShape**))                                            \
  X(CreateMemoryInfo, 68, RawStatus*(char const*, int, int, int, RawMemory**))                                     \
  X(CreateCpuMemoryInfo, 69, RawStatus*(int, int, RawMemory**))                                                    \
  X(AllocatorFree, 76, RawStatus*(RawAllocator*, void*))                                                           \
  X(GetAllocatorWithDefaultOptions, 78, RawStatus*(RawAllocator**))                                                \
  X(ReleaseEnv, 92, void(RawEnv*))                                                                                 \
  X(ReleaseStatus, 93, void(RawStatus*))                                                                           \
  X(ReleaseMemoryInfo, 94, void(RawMemory*))                                                                       \
  X(ReleaseSession, 95, void(RawSession*))                                                                         \
  X(ReleaseValue, 96, void(RawValue*))                                                                             \
  X(ReleaseRunOptions, 97, void(RawRunOptions*))                                                                   \
  X(ReleaseTypeInfo, 98, void(RawTypeInfo*))                                                                       \
  X(ReleaseTensorTypeAndShapeInfo, 99, void(RawShape*))                                                            \
  X(ReleaseSessionOptions, 100, void(RawOptions*))                                                                 \
  X(SessionGetModelMetadata, 111, RawStatus*(RawSession const*, RawMetadata**))                                    \
  X(ModelMetadataLookupCustomMetadataMap, 116, RawStatus*(RawMetadata const*, RawAllocator*, char const*, char**)) \
  X(ReleaseModelMetadata, 118, void(RawMetadata*))                                                                 \
  X(GetAvailableProviders, 125, RawStatus*(char***, int*))                                                         \
  X(ReleaseAvailableProviders, 126, RawStatus*(char**, int))                                                       \
  X(AddSessionConfigEntry, 130, RawStatus*(RawOptions*, char const*, char const*))                                 \
  X(RunWithBinding, 133, RawStatus*(RawSession*, RawRunOptions const*, RawBinding const*))                         \
  X(CreateIoBinding, 134, RawStatus*(RawSession*, RawBinding**))                                                   \
  X(ReleaseIoBinding, 135, void(RawBinding*))                                                                      \
  X(BindInput, 136, RawStatus*(RawBinding*, char const*, RawValue const*))                                         \
  X(BindOutput, 137, RawStatus*(RawBinding*, char const*, RawValue const*))                                        \
  X(AddInitializer, 150, RawStatus*(RawOptions*, char const*, RawValue const*))                                    \
  X(AddRunConfigEntry, 165, RawStatus*(RawRunOptions*, char const*, char const*))                                  \
  X(CreatePrepackedWeightsContainer, 166, RawStatus*(RawPackedWeights**))                                          \
  X(ReleasePrepackedWeightsContainer, 167, void(RawPackedWeights*))                                                \
  X(CreateSessionFromArrayWithPrepackedWeightsContainer, 169,                                                      \
    RawStatus*(RawEnv const*, void const*, std::size_t, RawOptions const*, RawPackedWeights*, RawSession**))       \
  X(SessionOptionsAppendExecutionProvider_CUDA_V2, 204, RawStatus*(RawOptions*, RawCuda const*))                   \
  X(CreateCUDAProviderOptions, 205, RawStatus*(RawCuda**))                                                         \
  X(UpdateCUDAProviderOptions, 206, RawStatus*(RawCuda*, char const* const*, char const* const*, std::size_t))     \
  X(ReleaseCUDAProviderOptions, 208, void(RawCuda*))                                                               \
  X(AddExternalInitializers, 210, RawStatus*(RawOptions*, char const* const*, RawValue const* const*, std::size_t))

// The functions, under their names in OrtApi.
struct Functions {
  explicit Functions(abi::Function const* functions) : table(functions) {}
  Functions(Functions const&) = delete;
  Functions& operator=(Functions const&) = delete;

  abi::Function const* const table;  // before the entries, which point to it
#define TIDE_ORT_ENTRY(name, position, ...) abi::Entry<position, __VA_ARGS__> const name{&table};
  TIDE_ORT_FUNCTIONS(TIDE_ORT_ENTRY)
#undef TIDE_ORT_ENTRY
};

constexpr int kDeviceAllocator = 0;  // OrtDeviceAllocator
constexpr int kDefaultMemory = 0;    // OrtMemTypeDefault
constexpr int kFatal = 4;            // ORT_LOGGING_LEVEL_FATAL
constexpr int kTensor = 1;           // ONNX_TYPE_TENSOR

using ElementType = int;  // ONNXTensorElementDataType; the others are in abi
constexpr ElementType kInt16 = 5, kDouble = 11;

}  // namespace Ort

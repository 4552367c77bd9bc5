// Compares what cpp/ declares of the CUDA runtime with the real header, of CUDA 13; it only compiles if all is the same.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <type_traits>

#include "../../cpp/src/segmented/cudart.h"

namespace tide {
namespace cuda {
namespace {

// Whether two functions take as many arguments, of the same sizes.
template <typename, typename>
constexpr bool kAlike = false;
template <typename Ours, typename Theirs, typename... A, typename... B>
constexpr bool kAlike<Ours(A...), Theirs(B...)> = sizeof...(A) == sizeof...(B) && ((sizeof(A) == sizeof(B)) && ...);

#define SAME_FUNCTION(name, arguments) static_assert(kAlike<Error arguments, decltype(::cuda##name)>, #name);
TIDE_CUDA_FUNCTIONS(SAME_FUNCTION)
TIDE_CUDA_DECIDING_FUNCTIONS(SAME_FUNCTION)
#define SAME_NUMBER(mine, theirs) static_assert(static_cast<int>(mine) == static_cast<int>(theirs), #theirs);
SAME_NUMBER(kSuccess, cudaSuccess)
SAME_NUMBER(kNoMemory, cudaErrorMemoryAllocation)
SAME_NUMBER(kHostToDevice, cudaMemcpyHostToDevice)
SAME_NUMBER(kDeviceToHost, cudaMemcpyDeviceToHost)
SAME_NUMBER(kDeviceToDevice, cudaMemcpyDeviceToDevice)
SAME_NUMBER(kCaptureInThread, cudaStreamCaptureModeThreadLocal)
SAME_NUMBER(kCaptureRelaxed, cudaStreamCaptureModeRelaxed)
SAME_NUMBER(kMajor, cudaDevAttrComputeCapabilityMajor)
SAME_NUMBER(kMinor, cudaDevAttrComputeCapabilityMinor)
SAME_NUMBER(kNonBlocking, cudaStreamNonBlocking)
SAME_NUMBER(kAssignDefault, cudaGraphCondAssignDefault)
static_assert(kPropertiesSize >= sizeof(cudaDeviceProp));
static_assert(sizeof(Handle) == sizeof(cudaGraphConditionalHandle));

static_assert(sizeof(SwitchNode) == sizeof(cudaGraphNodeParams));
static_assert(offsetof(SwitchNode, type) == offsetof(cudaGraphNodeParams, type));
static_assert(offsetof(SwitchNode, handle) == offsetof(cudaGraphNodeParams, conditional.handle));
static_assert(offsetof(SwitchNode, kind) == offsetof(cudaGraphNodeParams, conditional.type));
static_assert(offsetof(SwitchNode, size) == offsetof(cudaGraphNodeParams, conditional.size));
static_assert(offsetof(SwitchNode, bodies) == offsetof(cudaGraphNodeParams, conditional.phGraph_out));
static_assert(SwitchNode{}.type == cudaGraphNodeTypeConditional);
static_assert(SwitchNode{}.kind == cudaGraphCondTypeSwitch);

}  // namespace
}  // namespace cuda
}  // namespace tide

// Declares the functions of the CUDA runtime that are called, by name in a library that is opened when the first is needed, so
// that this library compiles without CUDA's headers and runs without CUDA. They are those of CUDA 12 and 13.
#pragma once

#include <cstddef>
#include <string>

namespace tide {
namespace cuda {

using Error = int;  // cudaError_t
constexpr Error kSuccess = 0, kNoMemory = 2, kOldDriver = 35;
constexpr int kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3;  // cudaMemcpyKind
constexpr int kCaptureInThread = 1;                                       // cudaStreamCaptureModeThreadLocal
constexpr int kMajor = 75, kMinor = 76;                                   // cudaDevAttrComputeCapability...
constexpr int kCaptureRelaxed = 2;                                        // cudaStreamCaptureModeRelaxed
constexpr int kDecidesSince = 12080;                                      // CUDA's version that has switch nodes
constexpr unsigned kNonBlocking = 1;                                      // cudaStreamNonBlocking
constexpr std::size_t kPropertiesSize = 4096;                             // above cudaDeviceProp's; a name comes first

using Stream = void*;
using Graph = void*;
using GraphExec = void*;
using GraphNode = void*;
using Library = void*;
using Kernel = void*;
using Handle = unsigned long long;  // cudaGraphConditionalHandle
constexpr unsigned kAssignDefault = 1;  // cudaGraphCondAssignDefault

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

// cudaGraphNodeParams, of a conditional node.
struct SwitchNode {
  int type = 13;  // cudaGraphNodeTypeConditional
  int reserved0[3] = {};
  Handle handle = 0;
  int kind = 2;             // cudaGraphCondTypeSwitch
  unsigned size = 0;        // bodies
  Graph* bodies = nullptr;  // set by cudaGraphAddNode
  long long reserved[27] = {};
};

// X(name without "cuda", arguments)
#define TIDE_CUDA_FUNCTIONS(X)                                                              \
  X(GetDeviceCount, (int*))                                                                 \
  X(SetDevice, (int))                                                                       \
  X(GetLastError, ())                                                                       \
  X(DeviceGetAttribute, (int*, int, int))                                                   \
  X(GetDeviceProperties, (void*, int))                                                      \
  X(DriverGetVersion, (int*))                                                               \
  X(RuntimeGetVersion, (int*))                                                              \
  X(Malloc, (void**, std::size_t))                                                          \
  X(MemGetInfo, (std::size_t*, std::size_t*))                                               \
  X(Free, (void*))                                                                          \
  X(HostAlloc, (void**, std::size_t, unsigned))                                             \
  X(FreeHost, (void*))                                                                      \
  X(MemcpyAsync, (void*, void const*, std::size_t, int, Stream))                            \
  X(MemsetAsync, (void*, int, std::size_t, Stream))                                         \
  X(Memset2DAsync, (void*, std::size_t, int, std::size_t, std::size_t, Stream))             \
  X(StreamCreateWithFlags, (Stream*, unsigned))                                             \
  X(StreamDestroy, (Stream))                                                                \
  X(StreamSynchronize, (Stream))                                                            \
  X(StreamBeginCapture, (Stream, int))                                                      \
  X(StreamEndCapture, (Stream, Graph*))                                                     \
  X(ThreadExchangeStreamCaptureMode, (int*))                                                \
  X(GraphInstantiate, (GraphExec*, Graph, unsigned long long))                              \
  X(GraphLaunch, (GraphExec, Stream))                                                       \
  X(GraphDestroy, (Graph))                                                                  \
  X(GraphExecDestroy, (GraphExec))

// Those of graphs that decide, which CUDA has since 12.8.
#define TIDE_CUDA_DECIDING_FUNCTIONS(X)                                                                     \
  X(GraphCreate, (Graph*, unsigned))                                                                        \
  X(GraphAddChildGraphNode, (GraphNode*, Graph, GraphNode const*, std::size_t, Graph))                      \
  X(GraphConditionalHandleCreate, (Handle*, Graph, unsigned, unsigned))                                     \
  X(GraphAddNode, (GraphNode*, Graph, GraphNode const*, void const*, std::size_t, SwitchNode*))             \
  X(StreamBeginCaptureToGraph, (Stream, Graph, GraphNode const*, void const*, std::size_t, int))            \
  X(LibraryLoadData, (Library*, void const*, int*, void**, unsigned, int*, void**, unsigned))               \
  X(LibraryGetKernel, (Kernel*, Library, char const*))                                                      \
  X(LaunchKernel, (void const*, Dim3, Dim3, void**, std::size_t, Stream))

struct Functions {
#define TIDE_CUDA_MEMBER(name, arguments) Error(*name) arguments = nullptr;
  TIDE_CUDA_FUNCTIONS(TIDE_CUDA_MEMBER)
  TIDE_CUDA_DECIDING_FUNCTIONS(TIDE_CUDA_MEMBER)  // null: the library does not have it
#undef TIDE_CUDA_MEMBER
  char const* (*GetErrorString)(Error) = nullptr;
};

// Opens the library that the environment variable TIDE_CUDART names, else libcudart where the system finds it. Throws
// ProviderError: there is none, or it lacks a function.
Functions const& functions();

// Whether library and driver have graphs that decide, and the environment variable TIDE_HOST_DECIDES does not forbid them.
bool decides();

bool finds_gpu();  // without CUDA: no

// A GPU's name as part of a file's name, such as `NVIDIA-H100-PCIe`; "none" where there is none. Throws as `functions`.
std::string device_name(int gpu);

}  // namespace cuda
}  // namespace tide

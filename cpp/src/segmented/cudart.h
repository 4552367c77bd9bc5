// The functions of the CUDA runtime that the runtime calls, by name in a library that is opened when the first is needed, so
// that it compiles without CUDA's headers and runs without CUDA. They are those of CUDA 12 and 13.
#pragma once

#include <cstddef>

namespace tide {
namespace cuda {

using Error = int;  // cudaError_t
constexpr Error kSuccess = 0, kNoMemory = 2;
constexpr int kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3;  // cudaMemcpyKind
constexpr int kCaptureInThread = 1;                                       // cudaStreamCaptureModeThreadLocal
constexpr int kMajor = 75, kMinor = 76;                                   // cudaDevAttrComputeCapability...
constexpr unsigned kNonBlocking = 1;                                      // cudaStreamNonBlocking
constexpr std::size_t kPropertiesSize = 4096;                             // above cudaDeviceProp's; a name comes first

using Stream = void*;
using Graph = void*;
using GraphExec = void*;

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
  X(GraphInstantiate, (GraphExec*, Graph, unsigned long long))                              \
  X(GraphLaunch, (GraphExec, Stream))                                                       \
  X(GraphDestroy, (Graph))                                                                  \
  X(GraphExecDestroy, (GraphExec))

struct Functions {
#define TIDE_CUDA_MEMBER(name, arguments) Error(*name) arguments = nullptr;
  TIDE_CUDA_FUNCTIONS(TIDE_CUDA_MEMBER)
#undef TIDE_CUDA_MEMBER
  char const* (*GetErrorString)(Error) = nullptr;
};

// Opens the library that the environment variable TIDE_CUDART names, else libcudart where the system finds it. Throws
// ProviderError: there is none, or it lacks a function.
Functions const& functions();

bool finds_gpu();  // without CUDA: no

}  // namespace cuda
}  // namespace tide

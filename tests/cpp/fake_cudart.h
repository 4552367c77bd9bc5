// The part of the CUDA runtime API that `CudaDevice` calls, on host memory.
//
// Queued work is executed only when its stream is synchronized, so that reading or overwriting staging memory too early
// fails a test. Work queued during a capture is recorded and executed, with the same addresses, at every launch of the
// graph. Memory is NaN until it is written; copies are checked against the allocations. The GPU has compute capability
// 8.9, or FAKE_CUDA_CAPABILITY in the environment; FAKE_CUDA_DRIVER removes it and is the driver's version,
// FAKE_CUDA_DEVICES is the number of GPUs, FAKE_CUDA_GPU the only one that may be used. A thread that has set none can do
// nothing, and a stream is waited for in threads that have set its GPU. The Python counterpart is
// tests/runtime/segmented/fake_cudart.py.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

void fake_cuda_enqueue(cudaStream_t stream, std::function<void()> work);
bool fake_cuda_is_capturing(cudaStream_t stream);
void fake_cuda_limit(std::size_t bytes);  // that may be allocated, pinned memory included
std::size_t fake_cuda_graphs();           // recorded
std::size_t fake_cuda_launches();         // of recorded graphs

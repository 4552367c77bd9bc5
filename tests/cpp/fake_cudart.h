// The part of the CUDA runtime API that `CudaDevice` calls, on host memory, as late and as literal as a GPU may be.
//
// Work queued on a stream is done when the stream is synchronized and not before, so what reads or overwrites staging
// memory too early is found out. What is queued during a capture is recorded and done again, with the very same
// addresses, at every launch of the graph. Memory is NaN until it is set; copies are checked against what is allocated.
// The GPU is of compute capability 8.9; FAKE_CUDA_DRIVER in the environment takes it away and is the driver's version.
// tests/runtime/segmented/fake_cudart.py is its twin.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

void fake_cuda_enqueue(cudaStream_t stream, std::function<void()> work);
bool fake_cuda_is_capturing(cudaStream_t stream);
void fake_cuda_limit(std::size_t bytes);  // of memory there may be, pinned memory included
std::size_t fake_cuda_graphs();           // that were recorded
std::size_t fake_cuda_launches();         // of them

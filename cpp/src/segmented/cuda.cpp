#include "segmented/cuda.h"

#include <cstring>
#include <iostream>
#include <iterator>
#include <mutex>
#include <string>

#include "tide/errors.h"

namespace tide {
namespace {

constexpr std::size_t kMaxGraphs = 256;  // recorded per device; the least recently used is evicted
constexpr std::size_t kMaxSeen = 4096;   // keys seen once

thread_local int current_gpu = -1;  // the one that CUDA uses in this thread; -1: not known

std::string reason_of(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "the GPU has not enough free memory for the sequence's buffers"
                                            : cudaGetErrorString(error);
}

// Throws GenerationError unless a call of the runtime API succeeded.
void require(cudaError_t error, char const* call) {
  if (error != cudaSuccess) throw GenerationError(std::string("CUDA failed (") + call + "): " + reason_of(error));
}

}  // namespace

void select_gpu(int gpu) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && gpu >= count) {
    throw ProviderError("there is no GPU " + std::to_string(gpu) + ": CUDA finds " + std::to_string(count) +
                        ", numbered from 0");
  }
  if (error == cudaSuccess) error = cudaSetDevice(gpu);
  if (error != cudaSuccess) throw ProviderError("the GPU cannot be used: " + reason_of(error));
  current_gpu = gpu;
}

CudaDevice::CudaDevice(int gpu, bool records) : gpu_(gpu), records_(records) {
  select_gpu(gpu);
  try {
    require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  } catch (GenerationError const& error) {
    throw ProviderError(std::string("the GPU cannot be used: ") + error.what());
  }
}

CudaDevice::~CudaDevice() {
  cudaStreamSynchronize(stream_);
  for (auto const& [key, graph] : recorded_) cudaGraphExecDestroy(graph);
  cudaStreamDestroy(stream_);
}

// Lets CUDA use this GPU, if another thread's or another engine's was used before.
void CudaDevice::use() const {
  if (current_gpu == gpu_) return;
  require(cudaSetDevice(gpu_), "cudaSetDevice");
  current_gpu = gpu_;
}

Buffer CudaDevice::allocate(std::size_t size) {
  use();
  void* memory = nullptr;
  require(cudaMalloc(&memory, size), "cudaMalloc");
  Buffer const buffer{{memory, cudaFree}, static_cast<std::byte*>(memory), size};
  clear(buffer.address, size, 1, 0);
  return buffer;
}

Buffer CudaDevice::staging(std::size_t size) {
  use();
  void* memory = nullptr;
  require(cudaHostAlloc(&memory, size, cudaHostAllocDefault), "cudaHostAlloc");
  Buffer const buffer{{memory, cudaFreeHost}, static_cast<std::byte*>(memory), size};
  std::memset(memory, 0, size);
  return buffer;
}

void CudaDevice::upload(std::byte* target, std::byte const* source, std::size_t size) {
  use();
  require(cudaMemcpyAsync(target, source, size, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
}

void CudaDevice::download(std::byte* target, std::byte const* source, std::size_t size) {
  use();
  require(cudaMemcpyAsync(target, source, size, cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync");
}

void CudaDevice::copy(std::byte* target, std::byte const* source, std::size_t size) {
  use();
  require(cudaMemcpyAsync(target, source, size, cudaMemcpyDeviceToDevice, stream_), "cudaMemcpyAsync");
}

void CudaDevice::clear(std::byte* target, std::size_t size, std::size_t count, std::size_t stride) {
  use();
  if (count == 1) {  // a stride may not be 2 GiB or more
    require(cudaMemsetAsync(target, 0, size, stream_), "cudaMemsetAsync");
  } else {
    require(cudaMemset2DAsync(target, stride, 0, size, count, stream_), "cudaMemset2DAsync");
  }
}

void CudaDevice::synchronize() {
  use();
  require(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
}

void CudaDevice::launch(WorkKey const& key, std::function<void()> const& work) {
  use();
  if (auto const entry = index_.find(key); entry != index_.end()) {
    recorded_.splice(recorded_.end(), recorded_, entry->second);
    require(cudaGraphLaunch(entry->second->second, stream_), "cudaGraphLaunch");
    return;
  }
  work();  // not recorded: an engine that last ran another shape changes to this one
  if (!records_) return;
  if (seen_.erase(key) == 0) {
    if (seen_.size() == kMaxSeen) seen_.clear();
    seen_.insert(key);
    return;
  }
  recorded_.emplace_back(key, nullptr);
  auto const entry = std::prev(recorded_.end());
  try {
    entry->second = record(work);
    index_[key] = entry;
  } catch (GenerationError const& error) {  // the work was queued above
    recorded_.erase(entry);
    end_recording(error.what());
    return;
  } catch (...) {  // the key counts as not seen
    if (entry->second != nullptr) cudaGraphExecDestroy(entry->second);
    recorded_.erase(entry);
    throw;
  }
  evict();
}

void CudaDevice::end_recording(std::string const& reason) {
  records_ = false;
  static std::once_flag warned;  // one warning, however many devices there are
  std::call_once(warned, [&] {
    std::cerr << "tide_runtime: runs are not recorded as CUDA graphs, which makes decoding slower: " + reason + "\n";
  });
}

// Records what `work` queues, without running it, as an executable graph.
cudaGraphExec_t CudaDevice::record(std::function<void()> const& work) {
  cudaGraph_t graph = nullptr;
  require(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  recording_ = true;
  try {
    work();
  } catch (...) {
    recording_ = false;
    // Without the end of the capture the stream would stay unusable.
    if (cudaStreamEndCapture(stream_, &graph) == cudaSuccess) cudaGraphDestroy(graph);
    throw;
  }
  recording_ = false;
  require(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
  cudaGraphExec_t executable = nullptr;
  cudaError_t const error = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  require(error, "cudaGraphInstantiate");
  return executable;
}

void CudaDevice::evict() {
  while (recorded_.size() > kMaxGraphs) {
    synchronize();
    index_.erase(recorded_.front().first);
    require(cudaGraphExecDestroy(recorded_.front().second), "cudaGraphExecDestroy");
    recorded_.pop_front();
  }
}

}  // namespace tide

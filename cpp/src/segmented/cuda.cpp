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

std::string reason_of(cuda::Error error) {
  return error == cuda::kNoMemory ? "the GPU has not enough free memory for the sequence's buffers"
                                  : cuda::functions().GetErrorString(error);
}

// Throws GenerationError unless a call of the runtime API succeeded.
void require(cuda::Error error, char const* call) {
  if (error != cuda::kSuccess) throw GenerationError(std::string("CUDA failed (") + call + "): " + reason_of(error));
}

}  // namespace

void select_gpu(int gpu) {
  int count = 0;
  cuda::Error error = cuda::functions().GetDeviceCount(&count);
  if (error == cuda::kSuccess && gpu >= count) {
    throw ProviderError("there is no GPU " + std::to_string(gpu) + ": CUDA finds " + std::to_string(count) +
                        ", numbered from 0");
  }
  if (error == cuda::kSuccess) error = cuda::functions().SetDevice(gpu);
  if (error != cuda::kSuccess) throw ProviderError("the GPU cannot be used: " + reason_of(error));
  current_gpu = gpu;
}

CudaDevice::CudaDevice(int gpu, bool records, std::function<void(std::string const&)> log)
    : gpu_(gpu), records_(records), log_(std::move(log)) {
  select_gpu(gpu);
  try {
    require(cuda::functions().StreamCreateWithFlags(&stream_, cuda::kNonBlocking), "cudaStreamCreateWithFlags");
  } catch (GenerationError const& error) {
    throw ProviderError(std::string("the GPU cannot be used: ") + error.what());
  }
}

CudaDevice::~CudaDevice() {
  cuda::functions().StreamSynchronize(stream_);
  for (auto const& [key, graph] : recorded_) cuda::functions().GraphExecDestroy(graph);
  cuda::functions().StreamDestroy(stream_);
}

// Lets CUDA use this GPU, if another thread's or another engine's was used before.
void CudaDevice::use() const {
  if (current_gpu == gpu_) return;
  require(cuda::functions().SetDevice(gpu_), "cudaSetDevice");
  current_gpu = gpu_;
}

Buffer CudaDevice::allocate(std::size_t size) {
  use();
  void* memory = nullptr;
  require(cuda::functions().Malloc(&memory, size), "cudaMalloc");
  Buffer const buffer{{memory, cuda::functions().Free}, static_cast<std::byte*>(memory), size};
  clear(buffer.address, size, 1, 0);
  return buffer;
}

Buffer CudaDevice::staging(std::size_t size) {
  use();
  void* memory = nullptr;
  require(cuda::functions().HostAlloc(&memory, size, 0), "cudaHostAlloc");
  Buffer const buffer{{memory, cuda::functions().FreeHost}, static_cast<std::byte*>(memory), size};
  std::memset(memory, 0, size);
  return buffer;
}

void CudaDevice::upload(std::byte* target, std::byte const* source, std::size_t size) {
  use();
  require(cuda::functions().MemcpyAsync(target, source, size, cuda::kHostToDevice, stream_), "cudaMemcpyAsync");
}

void CudaDevice::download(std::byte* target, std::byte const* source, std::size_t size) {
  use();
  require(cuda::functions().MemcpyAsync(target, source, size, cuda::kDeviceToHost, stream_), "cudaMemcpyAsync");
}

void CudaDevice::copy(std::byte* target, std::byte const* source, std::size_t size) {
  use();
  require(cuda::functions().MemcpyAsync(target, source, size, cuda::kDeviceToDevice, stream_), "cudaMemcpyAsync");
}

void CudaDevice::clear(std::byte* target, std::size_t size, std::size_t count, std::size_t stride) {
  use();
  if (count == 1) {  // a stride may not be 2 GiB or more
    require(cuda::functions().MemsetAsync(target, 0, size, stream_), "cudaMemsetAsync");
  } else {
    require(cuda::functions().Memset2DAsync(target, stride, 0, size, count, stream_), "cudaMemset2DAsync");
  }
}

void CudaDevice::synchronize() {
  use();
  require(cuda::functions().StreamSynchronize(stream_), "cudaStreamSynchronize");
}

void CudaDevice::launch(WorkKey const& key, std::function<void()> const& work) {
  use();
  if (auto const entry = index_.find(key); entry != index_.end()) {
    recorded_.splice(recorded_.end(), recorded_, entry->second);
    require(cuda::functions().GraphLaunch(entry->second->second, stream_), "cudaGraphLaunch");
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
    if (entry->second != nullptr) cuda::functions().GraphExecDestroy(entry->second);
    recorded_.erase(entry);
    throw;
  }
  evict();
}

void CudaDevice::end_recording(std::string const& reason) {
  records_ = false;
  static std::once_flag warned;  // one warning, however many devices there are
  std::call_once(warned, [&] {
    std::string const sentence = "runs are not recorded as CUDA graphs, which makes decoding slower: " + reason;
    if (log_) return log_(sentence);
    std::cerr << "tide_runtime: " + sentence + "\n";
  });
}

// Records what `work` queues, without running it, as an executable graph.
cuda::GraphExec CudaDevice::record(std::function<void()> const& work) {
  cuda::Graph graph = nullptr;
  require(cuda::functions().StreamBeginCapture(stream_, cuda::kCaptureInThread), "cudaStreamBeginCapture");
  recording_ = true;
  try {
    work();
  } catch (...) {
    recording_ = false;
    // Without the end of the capture the stream would stay unusable.
    if (cuda::functions().StreamEndCapture(stream_, &graph) == cuda::kSuccess) cuda::functions().GraphDestroy(graph);
    throw;
  }
  recording_ = false;
  require(cuda::functions().StreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
  cuda::GraphExec executable = nullptr;
  cuda::Error const error = cuda::functions().GraphInstantiate(&executable, graph, 0);
  cuda::functions().GraphDestroy(graph);
  require(error, "cudaGraphInstantiate");
  return executable;
}

void CudaDevice::evict() {
  while (recorded_.size() > kMaxGraphs) {
    synchronize();
    index_.erase(recorded_.front().first);
    require(cuda::functions().GraphExecDestroy(recorded_.front().second), "cudaGraphExecDestroy");
    recorded_.pop_front();
  }
}

}  // namespace tide

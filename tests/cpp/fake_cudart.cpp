#include "fake_cudart.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <vector>

using Work = std::function<void()>;

struct CUstream_st {
  int device = 0;
  std::vector<Work> queue, captured;
  bool capturing = false;
};
struct CUgraph_st {
  std::vector<Work> work;
};
struct CUgraphExec_st {
  std::vector<Work> work;
};

namespace {

enum class Place { host, device };

struct Block {
  std::size_t size;
  Place place;
};

thread_local int current = -1;  // the GPU that this thread works on; CUDA's is 0 until one is set

std::mutex mutex;
std::map<std::byte const*, Block> blocks;
std::size_t limit = std::size_t{1} << 30;
std::atomic<std::size_t> graphs{0}, launches{0};

bool allocated(void const* address, std::size_t size, Place place) {
  std::lock_guard<std::mutex> const lock(mutex);
  auto const* const at = static_cast<std::byte const*>(address);
  auto block = blocks.upper_bound(at);
  if (block == blocks.begin()) return false;
  --block;
  return block->second.place == place && at + size <= block->first + block->second.size;
}

cudaError_t allocate(void** memory, std::size_t size, Place place) {
  std::lock_guard<std::mutex> const lock(mutex);
  std::size_t held = size;
  for (auto const& [address, block] : blocks) held += block.size;
  if (held > limit) return cudaErrorMemoryAllocation;
  *memory = std::aligned_alloc(256, (size + 255) / 256 * 256);
  std::memset(*memory, 0xFF, size);  // NaN wherever it is read before it is set
  blocks[static_cast<std::byte const*>(*memory)] = {size, place};
  return cudaSuccess;
}

// Whether a call is the one that the test makes fail.
bool fails(char const* call) {
  char const* const failing = std::getenv("FAKE_CUDA_FAILS");
  return failing != nullptr && std::strcmp(failing, call) == 0;
}

cudaError_t release(void* memory) {
  {
    std::lock_guard<std::mutex> const lock(mutex);
    if (blocks.erase(static_cast<std::byte const*>(memory)) == 0) return cudaErrorInvalidValue;
  }
  std::free(memory);
  return cudaSuccess;
}

}  // namespace

void fake_cuda_enqueue(cudaStream_t stream, Work work) {
  (stream->capturing ? stream->captured : stream->queue).push_back(std::move(work));
}
bool fake_cuda_is_capturing(cudaStream_t stream) { return stream->capturing; }
void fake_cuda_limit(std::size_t bytes) {
  std::lock_guard<std::mutex> const lock(mutex);
  limit = bytes;
}
std::size_t fake_cuda_graphs() { return graphs; }
std::size_t fake_cuda_launches() { return launches; }

extern "C" {

cudaError_t cudaDriverGetVersion(int* version) {
  char const* const given = std::getenv("FAKE_CUDA_DRIVER");
  *version = given != nullptr ? std::atoi(given) : CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (std::getenv("FAKE_CUDA_DRIVER") != nullptr) return cudaErrorInsufficientDriver;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || device >= count) return cudaErrorInvalidDevice;
  char const* const capability = std::getenv("FAKE_CUDA_CAPABILITY");  // of one digit each
  *value = (capability != nullptr ? capability : "8.9")[attribute == cudaDevAttrComputeCapabilityMajor ? 0 : 2] - '0';
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::strcpy(properties->name, "Fake GPU (8.9)");
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaGetDeviceCount(int* count) {
  if (std::getenv("FAKE_CUDA_DRIVER") != nullptr) return cudaErrorInsufficientDriver;
  char const* const given = std::getenv("FAKE_CUDA_DEVICES");
  *count = given != nullptr ? std::atoi(given) : 1;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  char const* const only = std::getenv("FAKE_CUDA_GPU");
  if (only != nullptr && std::atoi(only) != device) return cudaErrorInvalidDevice;
  current = device;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, std::size_t size) {
  return current < 0 ? cudaErrorInvalidDevice : allocate(memory, size, Place::device);
}
cudaError_t cudaHostAlloc(void** memory, std::size_t size, unsigned) { return allocate(memory, size, Place::host); }
cudaError_t cudaFree(void* memory) { return release(memory); }
cudaError_t cudaFreeHost(void* memory) { return release(memory); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  if (current < 0) return cudaErrorInvalidDevice;
  *stream = new CUstream_st;
  (*stream)->device = current;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (stream->device != current) return cudaErrorInvalidResourceHandle;
  if (stream->capturing) return cudaErrorStreamCaptureUnsupported;
  std::vector<Work> queue;
  queue.swap(stream->queue);
  for (Work const& work : queue) work();
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* target, int value, std::size_t size, cudaStream_t stream) {
  if (!allocated(target, size, Place::device)) return cudaErrorInvalidValue;
  fake_cuda_enqueue(stream, [=] {
    if (allocated(target, size, Place::device)) std::memset(target, value, size);
  });
  return cudaSuccess;
}
cudaError_t cudaMemset2DAsync(void* target, std::size_t pitch, int value, std::size_t width, std::size_t height,
                              cudaStream_t stream) {
  if (width > pitch) return cudaErrorInvalidValue;
  for (std::size_t row = 0; row < height; ++row) {
    cudaError_t const error = cudaMemsetAsync(static_cast<char*>(target) + row * pitch, value, width, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* target, void const* source, std::size_t size, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  Place const to = kind == cudaMemcpyDeviceToHost ? Place::host : Place::device,
              from = kind == cudaMemcpyHostToDevice ? Place::host : Place::device;
  if (!allocated(target, size, to) || !allocated(source, size, from)) return cudaErrorInvalidValue;
  fake_cuda_enqueue(stream, [=] {
    if (!allocated(target, size, to) || !allocated(source, size, from)) std::abort();  // freed in the mean time
    std::memcpy(target, source, size);
  });
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (fails("cudaStreamBeginCapture")) return cudaErrorStreamCaptureInvalidated;
  stream->capturing = true;
  stream->captured.clear();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  stream->capturing = false;
  if (fails("cudaStreamEndCapture")) return cudaErrorStreamCaptureInvalidated;
  *graph = new CUgraph_st{stream->captured};
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  if (fails("cudaGraphInstantiate")) return cudaErrorStreamCaptureInvalidated;
  ++graphs;
  try {
    *executable = new CUgraphExec_st{graph->work};
  } catch (std::bad_alloc const&) {
    return cudaErrorMemoryAllocation;
  }
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  ++launches;
  for (Work const& work : executable->work) fake_cuda_enqueue(stream, work);
  return cudaSuccess;
}

char const* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidValue ? "invalid argument" : "another error";
}
}

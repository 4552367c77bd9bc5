// A stand-in for the CUDA runtime, on host memory: late where a GPU is late, and as strict as CUDA.
//
// Queued work is done when its stream is synchronized, so that reading or overwriting memory too early fails a test. What
// is captured is recorded, and done with the same addresses at each launch. Memory is NaN until it is set. Addresses
// outside what is allocated are refused, as are calls of a thread that has set no GPU, or another than the stream's.
//
// Tests set the variables `fake_cuda_...`. As long as `fake_cuda_devices` is 0 this is a machine without a GPU.
#include "segmented/cudart.h"

#include <atomic>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

using namespace tide::cuda;

#define FAKE_CUDA_DECLARE(name, arguments) extern "C" Error cuda##name arguments;
TIDE_CUDA_FUNCTIONS(FAKE_CUDA_DECLARE)

extern "C" {
int fake_cuda_devices = 0, fake_cuda_driver = 13000, fake_cuda_capability = 89;
int fake_cuda_only = -1;                             // the number of the GPU that can be used; -1: all
std::size_t fake_cuda_limit = std::size_t{1} << 30;  // bytes that may be allocated, pinned memory included
char fake_cuda_failing[64] = "";                     // the function that fails
long fake_cuda_countdown = 0;                        // the call that fails after so many, whatever it calls; 0: none
char fake_cuda_error[256] = "";                      // why queued work failed
std::atomic<std::size_t> fake_cuda_allocated{0}, fake_cuda_downloaded{0};  // bytes
std::atomic<long> fake_cuda_objects{0};                                    // streams and graphs that exist
}

namespace {

constexpr Error kInvalidValue = 1, kOldDriver = 35, kNoDevice = 100, kInvalidDevice = 101, kInvalidHandle = 400,
                kWorkFailed = 719, kCaptureUnsupported = 900, kCaptureInvalidated = 901;

using Work = std::function<Error()>;

struct FakeStream {
  int gpu;
  bool capturing = false;
  std::vector<Work> queue{}, captured{};
};

using FakeGraph = std::vector<Work>;

struct Block {
  std::size_t size;
  bool on_host;
};

thread_local int current = -1;                 // the GPU that this thread has set
thread_local FakeStream* capturing = nullptr;  // by this thread

std::mutex mutex;
std::map<std::byte const*, Block> blocks;
std::map<std::string, long> calls;

// Counts a call, and returns whether it is to fail.
bool fails(char const* function) {
  std::lock_guard<std::mutex> const lock(mutex);
  ++calls[function];
  bool const counted_down = fake_cuda_countdown > 0 && --fake_cuda_countdown == 0;
  return counted_down || std::strcmp(fake_cuda_failing, function) == 0;
}

bool holds(void const* address, std::size_t size, bool on_host) {
  std::lock_guard<std::mutex> const lock(mutex);
  auto const* const start = static_cast<std::byte const*>(address);
  auto block = blocks.upper_bound(start);
  if (block == blocks.begin()) return false;
  --block;
  return block->second.on_host == on_host && start + size <= block->first + block->second.size;
}

Error allocate(void** memory, std::size_t size, bool on_host) {
  std::lock_guard<std::mutex> const lock(mutex);
  if (capturing != nullptr) return kCaptureUnsupported;
  if (current < 0) return kInvalidDevice;
  if (fake_cuda_allocated + size > fake_cuda_limit) return kNoMemory;
  *memory = std::aligned_alloc(256, (size + 255) / 256 * 256);
  std::memset(*memory, 0xFF, size);
  blocks[static_cast<std::byte const*>(*memory)] = {size, on_host};
  fake_cuda_allocated += size;
  return kSuccess;
}

Error release(void* memory) {
  std::lock_guard<std::mutex> const lock(mutex);
  auto const block = blocks.find(static_cast<std::byte const*>(memory));
  if (block == blocks.end()) return kInvalidValue;
  fake_cuda_allocated -= block->second.size;
  blocks.erase(block);
  std::free(memory);
  return kSuccess;
}

Error enqueue(Stream to, Work work) {
  auto& stream = *static_cast<FakeStream*>(to);
  if (stream.gpu != current) return kInvalidHandle;
  (stream.capturing ? stream.captured : stream.queue).push_back(std::move(work));
  return kSuccess;
}

}  // namespace

#define FAKE_CUDA_CALLED(name) \
  if (fails("cuda" #name)) return kCaptureInvalidated;

extern "C" {

// As cudaLaunchHostFunc, but for what `work` returns: what is queued after it is dropped if that is no success.
Error fake_cuda_queue(Stream stream, Error (*work)(void*), void* context) {
  return enqueue(stream, [=] { return work(context); });
}
bool fake_cuda_is_capturing(Stream stream) { return static_cast<FakeStream*>(stream)->capturing; }
bool fake_cuda_holds(void const* address, std::size_t size) { return holds(address, size, false); }
long fake_cuda_calls(char const* function) {
  std::lock_guard<std::mutex> const lock(mutex);
  if (*function != '\0') return calls[function];
  long all = 0;
  for (auto const& [name, count] : calls) all += count;
  return all;
}

Error cudaGetDeviceCount(int* count) {
  FAKE_CUDA_CALLED(GetDeviceCount)
  *count = fake_cuda_driver < 13000 ? 0 : fake_cuda_devices;
  return fake_cuda_driver < 13000 ? kOldDriver : *count == 0 ? kNoDevice : kSuccess;
}
Error cudaSetDevice(int gpu) {
  FAKE_CUDA_CALLED(SetDevice)
  if (gpu < 0 || gpu >= fake_cuda_devices || (fake_cuda_only >= 0 && gpu != fake_cuda_only)) return kInvalidDevice;
  current = gpu;
  return kSuccess;
}
Error cudaGetLastError() { return kSuccess; }
char const* cudaGetErrorString(Error error) { return error == kWorkFailed ? fake_cuda_error : "injected"; }
Error cudaDeviceGetAttribute(int* value, int attribute, int gpu) {
  if (fake_cuda_driver < 13000) return kOldDriver;
  if (gpu >= fake_cuda_devices) return kInvalidDevice;
  *value = attribute == kMajor ? fake_cuda_capability / 10 : fake_cuda_capability % 10;
  return kSuccess;
}
Error cudaGetDeviceProperties(void* properties, int) {
  std::strcpy(static_cast<char*>(properties), "Fake GPU (8.9)");
  return kSuccess;
}
Error cudaDriverGetVersion(int* version) {
  *version = fake_cuda_driver;
  return kSuccess;
}
Error cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}

Error cudaMalloc(void** memory, std::size_t size) {
  FAKE_CUDA_CALLED(Malloc)
  return allocate(memory, size, false);
}
Error cudaHostAlloc(void** memory, std::size_t size, unsigned) {
  FAKE_CUDA_CALLED(HostAlloc)
  return allocate(memory, size, true);
}
Error cudaFree(void* memory) { return release(memory); }
Error cudaFreeHost(void* memory) { return release(memory); }

Error cudaStreamCreateWithFlags(Stream* stream, unsigned flags) {
  FAKE_CUDA_CALLED(StreamCreateWithFlags)
  if (current < 0 || flags != kNonBlocking) return kInvalidValue;
  *stream = new FakeStream{current};
  ++fake_cuda_objects;
  return kSuccess;
}
Error cudaStreamDestroy(Stream stream) {
  delete static_cast<FakeStream*>(stream);
  --fake_cuda_objects;
  return kSuccess;
}
Error cudaStreamSynchronize(Stream of) {
  FAKE_CUDA_CALLED(StreamSynchronize)
  auto& stream = *static_cast<FakeStream*>(of);
  if (stream.capturing) return kCaptureUnsupported;
  std::vector<Work> queue;
  queue.swap(stream.queue);
  for (Work const& work : queue) {
    if (Error const error = work()) return error;
  }
  return kSuccess;
}

Error cudaMemsetAsync(void* target, int value, std::size_t size, Stream stream) {
  FAKE_CUDA_CALLED(MemsetAsync)
  if (!holds(target, size, false)) return kInvalidValue;
  return enqueue(stream, [=] {
    if (holds(target, size, false)) std::memset(target, value, size);
    return kSuccess;
  });
}
Error cudaMemset2DAsync(void* target, std::size_t pitch, int value, std::size_t width, std::size_t height, Stream stream) {
  FAKE_CUDA_CALLED(Memset2DAsync)
  if (width > pitch || pitch > INT_MAX || !holds(target, pitch * (height - 1) + width, false)) return kInvalidValue;
  return enqueue(stream, [=] {
    for (std::size_t row = 0; row < height; ++row) std::memset(static_cast<std::byte*>(target) + row * pitch, value, width);
    return kSuccess;
  });
}
Error cudaMemcpyAsync(void* target, void const* source, std::size_t size, int kind, Stream stream) {
  FAKE_CUDA_CALLED(MemcpyAsync)
  bool const to_host = kind == kDeviceToHost, from_host = kind == kHostToDevice;
  if (!holds(target, size, to_host) || !holds(source, size, from_host)) return kInvalidValue;
  return enqueue(stream, [=] {
    if (!holds(target, size, to_host) || !holds(source, size, from_host)) std::abort();  // freed in the mean time
    std::memcpy(target, source, size);
    if (to_host) fake_cuda_downloaded += size;
    return kSuccess;
  });
}

Error cudaStreamBeginCapture(Stream of, int mode) {
  FAKE_CUDA_CALLED(StreamBeginCapture)
  auto& stream = *static_cast<FakeStream*>(of);
  if (mode != kCaptureInThread || stream.capturing) return kInvalidValue;
  capturing = &stream;
  stream.capturing = true;
  stream.captured.clear();
  return kSuccess;
}
Error cudaStreamEndCapture(Stream of, Graph* graph) {
  auto& stream = *static_cast<FakeStream*>(of);
  stream.capturing = false;
  capturing = nullptr;
  FAKE_CUDA_CALLED(StreamEndCapture)
  *graph = new FakeGraph(stream.captured);
  ++fake_cuda_objects;
  return kSuccess;
}
Error cudaGraphInstantiate(GraphExec* executable, Graph graph, unsigned long long) {
  FAKE_CUDA_CALLED(GraphInstantiate)
  *executable = new FakeGraph(*static_cast<FakeGraph*>(graph));
  ++fake_cuda_objects;
  return kSuccess;
}
Error cudaGraphDestroy(Graph graph) {
  delete static_cast<FakeGraph*>(graph);
  --fake_cuda_objects;
  return kSuccess;
}
Error cudaGraphExecDestroy(GraphExec executable) {
  FAKE_CUDA_CALLED(GraphExecDestroy)
  return cudaGraphDestroy(executable);
}
Error cudaGraphLaunch(GraphExec executable, Stream stream) {
  FAKE_CUDA_CALLED(GraphLaunch)
  for (Work const& work : *static_cast<FakeGraph*>(executable)) {
    if (Error const error = enqueue(stream, work)) return error;
  }
  return kSuccess;
}
}

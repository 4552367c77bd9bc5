// A stand-in for the CUDA runtime, on host memory: late where a GPU is late, and as strict as CUDA.
//
// Queued work is done when its stream is synchronized, so that reading or overwriting memory too early fails a test. What
// is captured is recorded, and done with the same addresses at each launch. Graphs have switch nodes, with what CUDA
// requires of them. The kernels are compiled for the host. Memory is NaN until it is set. Addresses
// outside what is allocated are refused, as are calls of a thread that has set no GPU, or another than the stream's.
//
// Tests set the variables `fake_cuda_...`. As long as `fake_cuda_devices` is 0 this is a machine without a GPU.
#include "segmented/cudart.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../../../plugins/tide_exit/plan.h"
#include "fake_graphs.h"

using namespace tide::cuda;

#define FAKE_CUDA_DECLARE(name, arguments) extern "C" Error cuda##name arguments;
TIDE_CUDA_FUNCTIONS(FAKE_CUDA_DECLARE)
TIDE_CUDA_DECIDING_FUNCTIONS(FAKE_CUDA_DECLARE)

extern "C" {
int fake_cuda_devices = 0, fake_cuda_driver = 13000, fake_cuda_runtime = 13000, fake_cuda_capability = 89;
int fake_cuda_only = -1;                             // the number of the GPU that can be used; -1: all
std::size_t fake_cuda_limit = std::size_t{1} << 30;  // bytes that may be allocated, pinned memory included
char fake_cuda_failing[64] = "";                     // the function that fails
long fake_cuda_countdown = 0;                        // the call that fails after so many, whatever it calls; 0: none
char fake_cuda_error[256] = "";                      // why queued work failed
std::atomic<std::size_t> fake_cuda_allocated{0}, fake_cuda_downloaded{0};  // bytes
std::atomic<long> fake_cuda_objects{0};                                    // streams and graphs that exist
std::atomic<long> fake_cuda_chosen{0}, fake_cuda_skipped{0};               // switch nodes that ran a body, and none
}

namespace {

constexpr Error kInvalidValue = 1, kNoDevice = 100, kInvalidDevice = 101, kInvalidHandle = 400,
                kWorkFailed = 719, kCaptureUnsupported = 900, kCaptureInvalidated = 901;

struct FakeStream {
  int gpu;
  bool capturing = false, invalid = false;
  FakeGraph* target = nullptr;  // to which is captured; null: a new graph
  std::vector<Work> queue{}, captured{};
};

struct Block {
  std::size_t size;
  bool on_host;
};

thread_local int current = -1;                 // the GPU that this thread has set
thread_local FakeStream* capturing = nullptr;  // by this thread
thread_local int capture_mode = kCaptureInThread;

std::mutex mutex;
std::map<std::byte const*, Block> blocks;
std::map<std::string, long> calls;
Handle handles = 0;

// What CUDA refuses to a thread that captures, unless it is relaxed; the capture is invalid then.
bool refused() {
  if (capturing == nullptr || capture_mode == kCaptureRelaxed) return false;
  capturing->invalid = true;
  return true;
}

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

Error begin_capture(FakeStream& stream, FakeGraph* target, int mode) {
  if (mode != kCaptureInThread || stream.capturing) return kInvalidValue;
  capturing = &stream;
  stream.capturing = true;
  stream.invalid = false;
  stream.target = target;
  stream.captured.clear();
  return kSuccess;
}

// Whether a node is added after all others.
bool follows(FakeGraph const& graph, GraphNode const* after, std::size_t count) {
  if (graph.nodes.empty()) return count == 0;
  return count == 1 && after[0] == reinterpret_cast<GraphNode>(graph.nodes.size());
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
  *count = fake_cuda_driver < fake_cuda_runtime ? 0 : fake_cuda_devices;
  return fake_cuda_driver < fake_cuda_runtime ? kOldDriver : *count == 0 ? kNoDevice : kSuccess;
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
  if (fake_cuda_driver < fake_cuda_runtime) return kOldDriver;
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
  *version = fake_cuda_runtime;
  return kSuccess;
}

Error cudaMalloc(void** memory, std::size_t size) {
  FAKE_CUDA_CALLED(Malloc)
  return allocate(memory, size, false);
}
Error cudaMemGetInfo(std::size_t* free, std::size_t*) { return *free = fake_cuda_limit - fake_cuda_allocated, kSuccess; }
Error cudaHostAlloc(void** memory, std::size_t size, unsigned) {
  FAKE_CUDA_CALLED(HostAlloc)
  return allocate(memory, size, true);
}
Error cudaFree(void* memory) { return refused() ? kCaptureUnsupported : release(memory); }
Error cudaFreeHost(void* memory) { return refused() ? kCaptureUnsupported : release(memory); }
Error cudaThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(capture_mode, *mode);
  return kSuccess;
}

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
  if (stream.capturing || refused()) return kCaptureUnsupported;
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
  return begin_capture(stream, nullptr, mode);
}
Error cudaStreamBeginCaptureToGraph(Stream of, Graph to, GraphNode const*, void const*, std::size_t after, int mode) {
  FAKE_CUDA_CALLED(StreamBeginCaptureToGraph)
  auto* const graph = static_cast<FakeGraph*>(to);
  if (after != 0 || !graph->nodes.empty()) return kInvalidValue;
  return begin_capture(*static_cast<FakeStream*>(of), graph, mode);
}
Error cudaStreamEndCapture(Stream of, Graph* graph) {
  auto& stream = *static_cast<FakeStream*>(of);
  stream.capturing = false;
  capturing = nullptr;
  FAKE_CUDA_CALLED(StreamEndCapture)
  if (stream.invalid) return kCaptureInvalidated;
  FakeGraph* const target = stream.target;
  auto* const made = target != nullptr ? target : new FakeGraph();
  for (Work const& work : stream.captured) made->nodes.push_back({work});
  *graph = made;
  if (target == nullptr) ++fake_cuda_objects;
  return kSuccess;
}
Error cudaGraphCreate(Graph* graph, unsigned) {
  FAKE_CUDA_CALLED(GraphCreate)
  *graph = new FakeGraph();
  ++fake_cuda_objects;
  return kSuccess;
}
Error cudaGraphConditionalHandleCreate(Handle* handle, Graph of, unsigned value, unsigned flags) {
  FAKE_CUDA_CALLED(GraphConditionalHandleCreate)
  if (flags != kAssignDefault) return kInvalidValue;
  *handle = ++handles;
  static_cast<FakeGraph*>(of)->handles[*handle] = value;
  return kSuccess;
}
Error cudaGraphAddChildGraphNode(GraphNode* node, Graph to, GraphNode const* after, std::size_t count, Graph child) {
  FAKE_CUDA_CALLED(GraphAddChildGraphNode)
  auto& graph = *static_cast<FakeGraph*>(to);
  if (static_cast<FakeGraph*>(child)->chooses() || !follows(graph, after, count)) return kInvalidValue;
  for (FakeNode const& one : static_cast<FakeGraph*>(child)->nodes) graph.nodes.push_back(one);
  *node = reinterpret_cast<GraphNode>(graph.nodes.size());
  return kSuccess;
}
Error cudaGraphAddNode(GraphNode* node, Graph to, GraphNode const* after, void const* edges, std::size_t count,
                       SwitchNode* given) {
  FAKE_CUDA_CALLED(GraphAddNode)
  auto& graph = *static_cast<FakeGraph*>(to);
  if (edges != nullptr || !follows(graph, after, count) || given->type != 13 || given->kind != 2) return kInvalidValue;
  if (graph.handles.count(given->handle) == 0 || given->size == 0) return kInvalidValue;
  FakeNode made{nullptr, given->handle};
  for (unsigned i = 0; i < given->size; ++i) made.bodies.push_back(new FakeGraph());
  graph.nodes.push_back(made);
  graph.bodies.assign(made.bodies.begin(), made.bodies.end());
  given->bodies = graph.bodies.data();
  *node = reinterpret_cast<GraphNode>(graph.nodes.size());
  return kSuccess;
}
Error cudaLibraryLoadData(Library* library, void const* code, int*, void**, unsigned, int*, void**, unsigned) {
  FAKE_CUDA_CALLED(LibraryLoadData)
  bool const compressed = std::memcmp(code, "\x50\xED\x55\xBA", 4) == 0;  // as nvcc writes it
  if (!compressed && std::strncmp(static_cast<char const*>(code), ".version 8.7", 12) != 0) return kInvalidValue;
  *library = const_cast<void*>(code);
  return kSuccess;
}
Error cudaLibraryGetKernel(Kernel* kernel, Library library, char const* name) {
  FAKE_CUDA_CALLED(LibraryGetKernel)
  for (char const* const& known : tide::exits::kKernels) {
    *kernel = const_cast<char const**>(&known);
    if (std::strcmp(name, known) == 0) return *static_cast<char const*>(library) == '.' ? kInvalidValue : kSuccess;
  }
  std::string const entry = std::string(".visible .entry ") + name + "(";
  if (std::strcmp(name, "tide_decide") != 0 || std::strstr(static_cast<char const*>(library), entry.c_str()) == nullptr) {
    return kInvalidValue;
  }
  *kernel = library;
  return kSuccess;
}
// Queues a launch of the kernel of checkpoints, which FAKE_CUDA_EXIT has.
Error launch_exit(int type, Dim3 grid, Dim3 block, void** arguments, std::size_t shared, Stream stream) {
  using Launch = int (*)(int, unsigned, TideExitArgs const*, tide::exits::Plan const*);
  static auto const launch = reinterpret_cast<Launch>(dlsym(dlopen(std::getenv("FAKE_CUDA_EXIT"), RTLD_NOW), "fake_exit"));
  auto const args = *static_cast<TideExitArgs*>(arguments[0]);
  auto const plan = *static_cast<tide::exits::Plan*>(arguments[1]);
  auto const slots = static_cast<std::size_t>(args.slots);
  std::size_t const rows = slots * static_cast<std::size_t>(args.exit_rows * args.hidden);
  bool const fits = holds(args.scores, slots * 4, false) && holds(args.exits, slots * 4, false) &&
                    holds(args.last_tokens, slots * 8, false) && holds(args.thresholds, slots * 4, false) &&
                    holds(args.exit_states, rows * (type == TIDE_FLOAT32 ? 4 : 2), false) &&
                    holds(plan.counters, TIDE_EXIT_COUNTERS * 4, false) &&
                    holds(plan.workspace, static_cast<std::size_t>(tide::exits::workspace_bytes(args)), false);
  if (!fits || block.x != TIDE_BLOCK_THREADS || shared != tide::exits::kShared * sizeof(float)) return kInvalidValue;
  return enqueue(stream, [=] { return launch(type, grid.x, &args, &plan); });
}
Error cudaLaunchKernel(void const* kernel, Dim3 grid, Dim3 block, void** arguments, std::size_t shared, Stream stream) {
  FAKE_CUDA_CALLED(LaunchKernel)
  for (int type = 0; type < 3; ++type) {
    if (kernel == &tide::exits::kKernels[type]) return launch_exit(type, grid, block, arguments, shared, stream);
  }
  auto const step = *static_cast<tide::DecisionArguments*>(arguments[0]);
  auto const next = *static_cast<std::int32_t*>(arguments[1]);
  auto const handle = *static_cast<Handle*>(arguments[2]);
  if (grid.x != 1 || block.x < static_cast<unsigned>(step.slots) || block.x > 1024 || capturing == nullptr) {
    return kInvalidValue;
  }
  return enqueue(stream, [=] { return tide_decide(step, next, handle); });
}
Error cudaGraphInstantiate(GraphExec* executable, Graph of, unsigned long long) {
  FAKE_CUDA_CALLED(GraphInstantiate)
  auto& graph = *static_cast<FakeGraph*>(of);
  for (auto const& [handle, value] : graph.handles) {
    Handle const wanted = handle;
    auto const has = [&](FakeNode const& node) { return node.handle == wanted; };
    if (std::none_of(graph.nodes.begin(), graph.nodes.end(), has)) return kInvalidValue;
  }
  if (graph.chooses() && std::exchange(graph.instantiated, true)) return kInvalidValue;
  *executable = copy(graph);
  ++fake_cuda_objects;
  return kSuccess;
}
Error cudaGraphDestroy(Graph graph) {
  destroy(static_cast<FakeGraph*>(graph));
  --fake_cuda_objects;
  return kSuccess;
}
Error cudaGraphExecDestroy(GraphExec executable) {
  FAKE_CUDA_CALLED(GraphExecDestroy)
  return cudaGraphDestroy(executable);
}
Error cudaGraphLaunch(GraphExec executable, Stream stream) {
  FAKE_CUDA_CALLED(GraphLaunch)
  auto const* const graph = static_cast<FakeGraph*>(executable);
  return enqueue(stream, [graph] {
    for (auto const& [handle, value] : graph->handles) values[handle] = value;
    return run(*graph);
  });
}
}

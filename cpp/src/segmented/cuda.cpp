#include "segmented/cuda.h"

#include <algorithm>
#include <cstdlib>
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
constexpr int kMaxFailures = 3;          // to record, per device: what else this thread does may have been the cause
constexpr char const* kRuns = "runs are not recorded as CUDA graphs";
constexpr char const* kSteps = "steps are not recorded as one CUDA graph each";

thread_local int current_gpu = -1;  // the one that CUDA uses in this thread; -1: not known

std::string reason_of(cuda::Error error) {
  if (error == cuda::kOldDriver) return "NVIDIA's driver is older than the CUDA runtime: update the driver";
  return error == cuda::kNoMemory ? "the GPU has not enough free memory for the sequence's buffers"
                                  : cuda::functions().GetErrorString(error);
}

// Lets this thread call what CUDA refuses to a thread that records: objects may be destroyed while it does.
class Relaxed {
 public:
  Relaxed() { cuda::functions().ThreadExchangeStreamCaptureMode(&mode_); }
  ~Relaxed() { cuda::functions().ThreadExchangeStreamCaptureMode(&mode_); }

 private:
  int mode_ = cuda::kCaptureRelaxed;
};

void free_memory(void* memory) {
  Relaxed const relaxed;
  cuda::functions().Free(memory);
}

void free_staging(void* memory) {
  Relaxed const relaxed;
  cuda::functions().FreeHost(memory);
}

}  // namespace

namespace cuda {

void require(Error error, char const* call) {
  if (error != kSuccess) throw GenerationError(std::string("CUDA failed (") + call + "): " + reason_of(error));
}

void require_recorded(Error error, char const* call) {
  if (error == kSuccess) return;
  functions().GetLastError();  // clears it
  throw RecordingError(std::string("CUDA failed (") + call + "): " + reason_of(error));
}

std::size_t recordings_budget() {
  char const* const given = std::getenv(kBudget);
  return (given == nullptr || *given == '\0' ? std::size_t{512} : std::strtoull(given, nullptr, 10)) << 20;
}

std::size_t free_bytes() {
  std::size_t free = 0, all = 0;
  require(functions().MemGetInfo(&free, &all), "cudaMemGetInfo");
  return free;
}

SharedStream::~SharedStream() {
  Relaxed const relaxed;
  functions().StreamDestroy(stream);
}

std::shared_ptr<SharedStream> make_stream(int gpu) {
  select_gpu(gpu);
  Stream stream = nullptr;
  try {
    require(functions().StreamCreateWithFlags(&stream, kNonBlocking), "cudaStreamCreateWithFlags");
  } catch (GenerationError const& error) {
    throw ProviderError(std::string("the GPU cannot be used: ") + error.what());
  }
  auto made = std::make_shared<SharedStream>();
  made->stream = stream;
  return made;
}

}  // namespace cuda

using cuda::require;

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

CudaDevice::CudaDevice(int gpu, bool records, std::function<void(std::string const&)> log,
                       std::shared_ptr<cuda::SharedStream> shared)
    : gpu_(gpu),
      shared_(shared == nullptr ? cuda::make_stream(gpu) : std::move(shared)),
      stream_(shared_->stream),
      records_(records && cuda::recordings_budget() > 0),
      decides_(cuda::decides()),
      budget_(cuda::recordings_budget()),
      log_(std::move(log)) {}

CudaDevice::~CudaDevice() {
  std::lock_guard<std::recursive_mutex> const turn(shared_->turn);
  Relaxed const relaxed;
  cuda::functions().StreamSynchronize(stream_);
  for (Recording const& one : recorded_) cuda::functions().GraphExecDestroy(one.graph);
}

// Lets CUDA use this GPU, if another thread's or another engine's was used before, and takes the turn.
std::unique_lock<std::recursive_mutex> CudaDevice::use() const {
  std::unique_lock<std::recursive_mutex> turn(shared_->turn);
  if (current_gpu == gpu_) return turn;
  require(cuda::functions().SetDevice(gpu_), "cudaSetDevice");
  current_gpu = gpu_;
  return turn;
}

Buffer CudaDevice::allocate(std::size_t size) {
  auto const turn = use();
  void* memory = nullptr;
  require(cuda::functions().Malloc(&memory, size), "cudaMalloc");
  Buffer const buffer{{memory, free_memory}, static_cast<std::byte*>(memory), size};
  clear(buffer.address, size, 1, 0);
  return buffer;
}

Buffer CudaDevice::staging(std::size_t size) {
  auto const turn = use();
  void* memory = nullptr;
  require(cuda::functions().HostAlloc(&memory, size, 0), "cudaHostAlloc");
  Buffer const buffer{{memory, free_staging}, static_cast<std::byte*>(memory), size};
  std::memset(memory, 0, size);
  return buffer;
}

void CudaDevice::upload(std::byte* target, std::byte const* source, std::size_t size) {
  auto const turn = use();
  require(cuda::functions().MemcpyAsync(target, source, size, cuda::kHostToDevice, stream_), "cudaMemcpyAsync");
}

void CudaDevice::download(std::byte* target, std::byte const* source, std::size_t size) {
  auto const turn = use();
  require(cuda::functions().MemcpyAsync(target, source, size, cuda::kDeviceToHost, stream_), "cudaMemcpyAsync");
}

void CudaDevice::copy(std::byte* target, std::byte const* source, std::size_t size) {
  auto const turn = use();
  require(cuda::functions().MemcpyAsync(target, source, size, cuda::kDeviceToDevice, stream_), "cudaMemcpyAsync");
}

void CudaDevice::clear(std::byte* target, std::size_t size, std::size_t count, std::size_t stride) {
  auto const turn = use();
  if (count == 1) {  // a stride may not be 2 GiB or more
    require(cuda::functions().MemsetAsync(target, 0, size, stream_), "cudaMemsetAsync");
  } else {
    require(cuda::functions().Memset2DAsync(target, stride, 0, size, count, stream_), "cudaMemset2DAsync");
  }
}

void CudaDevice::synchronize() {
  auto const turn = use();
  require(cuda::functions().StreamSynchronize(stream_), "cudaStreamSynchronize");
}

void CudaDevice::launch(WorkKey const& key, std::function<void()> const& work) {
  auto const turn = use();
  if (replays(key)) return replay(key);
  if (!records_ || !seen_before(key)) return work();
  Making making(*this, key);
  work();  // not recorded: a plan that last ran another shape changes to this one
  if (records_) making.finish(records_, kRuns, [&] { return instantiated(captured(work)); });
}

bool CudaDevice::record(WorkKey const& key, std::function<ChosenWork()> const& work) {
  auto const turn = use();
  if (replays(key)) return true;
  if (!records_ || !decides_ || !seen_before(key)) return false;
  return Making(*this, key).finish(decides_, kSteps, [&] { return recorded(work()); });
}

void CudaDevice::replay(WorkKey const& key) {
  auto const turn = use();
  auto const entry = index_.at(key);
  recorded_.splice(recorded_.end(), recorded_, entry);
  require(cuda::functions().GraphLaunch(entry->graph, stream_), "cudaGraphLaunch");
}

bool CudaDevice::replays(WorkKey const& key) { return index_.count(key) != 0; }

// Returns whether the key was seen once, and forgets it; else it has been seen now.
bool CudaDevice::seen_before(WorkKey const& key) {
  if (seen_.erase(key) != 0) return true;
  if (seen_.size() == kMaxSeen) seen_.clear();
  seen_.insert(key);
  return false;
}

CudaDevice::Making::Making(CudaDevice& device, WorkKey const& key) : device_(device), free_(cuda::free_bytes()) {
  device.recorded_.push_back({key, ++device.recordings_});
  device.making_ = &device.recorded_.back();
}

CudaDevice::Making::~Making() {
  if (device_.making_ == nullptr) return;  // it is kept
  if (device_.making_->graph != nullptr) cuda::functions().GraphExecDestroy(device_.making_->graph);
  device_.making_ = nullptr;
  device_.recorded_.pop_back();
}

// Keeps the recording that `recorded` makes; returns whether it could be made. Where it fails again and again nothing of
// the kind is recorded from now on: `allowed` is set to false.
bool CudaDevice::Making::finish(bool& allowed, char const* what, std::function<cuda::GraphExec()> const& recorded) {
  try {
    Recording& made = *device_.making_;
    made.graph = recorded();
    made.bytes = free_ - std::min(free_, cuda::free_bytes());
    device_.bytes_ += made.bytes;
    device_.index_[made.key] = std::prev(device_.recorded_.end());
  } catch (cuda::RecordingError const& error) {
    if (++device_.failures_ % kMaxFailures == 0) device_.stop(allowed, what, error.what());
    return false;
  }
  device_.making_ = nullptr;
  device_.evict();
  return true;
}

void CudaDevice::end_recording(std::string const& reason) { stop(records_, kRuns, reason); }

// Records nothing more of a kind, and says so.
void CudaDevice::stop(bool& allowed, std::string const& what, std::string const& reason) {
  allowed = false;
  warn_once(what, reason);
}

// Warns once in the process, however many devices there are.
void CudaDevice::warn_once(std::string const& what, std::string const& reason) {
  static std::mutex mutex;
  static std::set<std::string> warned;
  {
    std::lock_guard<std::mutex> const lock(mutex);
    if (!warned.insert(what).second) return;
  }
  std::string const sentence = what + ", which makes decoding slower: " + reason;
  if (log_) return log_(sentence);
  std::cerr << "tide_runtime: " + sentence + "\n";
}

// Records what `work` queues, without running it, between `begin` and the end of the capture.
void CudaDevice::capture(std::function<void()> const& work, std::function<void()> const& begin, cuda::Graph* graph) {
  auto const end = [&] {
    recording_ = false;
    return cuda::functions().StreamEndCapture(stream_, graph);
  };
  begin();
  recording_ = true;
  try {
    work();
  } catch (GenerationError const& error) {
    end();  // without it the stream would stay unusable
    throw cuda::RecordingError(error.what());
  } catch (...) {
    end();
    throw;
  }
  cuda::require_recorded(end(), "cudaStreamEndCapture");
}

// Records what `work` queues as a graph of its own.
cuda::Graph CudaDevice::captured(std::function<void()> const& work) {
  cuda::Graph graph = nullptr;
  try {
    capture(work, [&] {
      cuda::require_recorded(cuda::functions().StreamBeginCapture(stream_, cuda::kCaptureInThread), "cudaStreamBeginCapture");
    }, &graph);
  } catch (...) {
    if (graph != nullptr) cuda::functions().GraphDestroy(graph);
    throw;
  }
  return graph;
}

// Makes a graph executable, and destroys it.
cuda::GraphExec CudaDevice::instantiated(cuda::Graph graph) {
  cuda::GraphExec executable = nullptr;
  cuda::Error const error = cuda::functions().GraphInstantiate(&executable, graph, 0);
  cuda::functions().GraphDestroy(graph);
  cuda::require_recorded(error, "cudaGraphInstantiate");
  return executable;
}

void CudaDevice::evict() {
  while (recorded_.size() > kMaxGraphs || (bytes_ > budget_ && recorded_.size() > 1)) {
    if (bytes_ > budget_) {
      warn_once("recordings of runs as CUDA graphs are given up",
                "they take more than " + std::to_string(budget_ >> 20) + " MiB (environment variable " + cuda::kBudget + ")");
    }
    synchronize();
    Recording const& oldest = recorded_.front();
    index_.erase(oldest.key);
    bytes_ -= oldest.bytes;
    require(cuda::functions().GraphExecDestroy(oldest.graph), "cudaGraphExecDestroy");
    recorded_.pop_front();
  }
}

}  // namespace tide

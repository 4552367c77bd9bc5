// Implements a device on a GPU: one CUDA stream, its memory, and the CUDA graphs recorded on it.
//
// Work with a new key is queued, the second time queued and recorded (TensorRT requires a run between a change of shape and the
// recording), and later replayed in one launch. Work of which the device chooses parts is recorded with switch nodes
// (`choosing.cpp`). Recordings have a budget of memory: the least recently used are given up. If recording fails repeatedly,
// the device queues every run instead, which is slower, and warns once.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "segmented/cudart.h"
#include "segmented/device.h"
#include "tide/errors.h"

namespace tide {
namespace cuda {

// Throws GenerationError, naming the call, unless it succeeded.
void require(Error error, char const* call);

// Work cannot be recorded, which is no reason that it cannot be done.
class RecordingError : public GenerationError {
 public:
  using GenerationError::GenerationError;
};

// The same for calls that record.
void require_recorded(Error error, char const* call);

constexpr char const* kBudget = "TIDE_CUDA_GRAPHS";  // environment variable: MiB that recordings may take; 0: none are made

// Its bytes, by default 512 MiB.
std::size_t recordings_budget();

// Bytes of this thread's GPU that are free.
std::size_t free_bytes();

// A stream of one or several devices, which take turns to queue work on it.
struct SharedStream {
  SharedStream() = default;
  SharedStream(SharedStream const&) = delete;
  SharedStream& operator=(SharedStream const&) = delete;
  ~SharedStream();

  Stream stream = nullptr;
  std::recursive_mutex turn;
};

// Makes one. Throws ProviderError, as `select_gpu`.
std::shared_ptr<SharedStream> make_stream(int gpu);

}  // namespace cuda

// Lets CUDA, and libraries on it, use this GPU in this thread. Throws ProviderError: CUDA cannot be used, or there is no
// such GPU.
void select_gpu(int gpu);

class CudaDevice final : public Device {
 public:
  // gpu: its number. records: whether launches may be recorded. log: receives the warning; none: stderr. shared: the
  // stream; null: one of its own. Throws ProviderError, as `select_gpu`.
  explicit CudaDevice(int gpu = 0, bool records = true, std::function<void(std::string const&)> log = {},
                      std::shared_ptr<cuda::SharedStream> shared = nullptr);
  CudaDevice(CudaDevice const&) = delete;
  CudaDevice& operator=(CudaDevice const&) = delete;
  ~CudaDevice() override;

  cuda::Stream stream() const { return stream_; }
  bool recording() const { return recording_; }  // work is recorded now, and not run

  // The number of the recording that work is queued or recorded for; 0: it is queued alone.
  std::int64_t recording_number() const { return making_ == nullptr ? 0 : making_->number; }

  // Keeps an object as long as that recording.
  void keep(std::shared_ptr<void> object) { making_->kept.push_back(std::move(object)); }

  // Records no work from now on.
  void end_recording(std::string const& reason);

  Buffer allocate(std::size_t size) override;
  Buffer staging(std::size_t size) override;
  void upload(std::byte* target, std::byte const* source, std::size_t size) override;
  void download(std::byte* target, std::byte const* source, std::size_t size) override;
  void copy(std::byte* target, std::byte const* source, std::size_t size) override;
  void clear(std::byte* target, std::size_t size, std::size_t count, std::size_t stride) override;
  void launch(WorkKey const& key, std::function<void()> const& work) override;
  bool record(WorkKey const& key, std::function<ChosenWork()> const& work) override;
  void replay(WorkKey const& key) override;
  bool records() const override { return records_; }
  bool decides() const override { return records_ && decides_; }
  void synchronize() override;

 private:
  // A recorded piece of work, with what must exist as long.
  struct Recording {
    WorkKey key;
    std::int64_t number;
    std::size_t bytes = 0;  // of the GPU's memory, that making it took
    cuda::GraphExec graph = nullptr;
    std::vector<std::shared_ptr<void>> kept{};
  };
  using Recorded = std::list<Recording>;

  // A recording that is being made, which is given up unless it is finished.
  class Making {
   public:
    Making(CudaDevice& device, WorkKey const& key);
    ~Making();
    bool finish(bool& allowed, char const* what, std::function<cuda::GraphExec()> const& recorded);

   private:
    CudaDevice& device_;
    std::size_t const free_;  // before
  };

  std::unique_lock<std::recursive_mutex> use() const;
  bool replays(WorkKey const& key);
  bool seen_before(WorkKey const& key);
  void stop(bool& allowed, std::string const& what, std::string const& reason);
  void warn_once(std::string const& what, std::string const& reason);
  void capture(std::function<void()> const& work, std::function<void()> const& begin, cuda::Graph* graph);
  cuda::Graph captured(std::function<void()> const& work);
  cuda::GraphExec instantiated(cuda::Graph graph);
  cuda::GraphExec recorded(ChosenWork const& work);
  void decide(DecisionArguments step, std::int32_t next, cuda::Handle handle);
  void evict();

  int gpu_;
  std::shared_ptr<cuda::SharedStream> shared_;
  cuda::Stream stream_ = nullptr;
  bool records_, decides_, recording_ = false;
  std::size_t const budget_;    // bytes that recordings may take
  std::size_t bytes_ = 0;       // that they take
  int failures_ = 0;            // of recordings
  std::int64_t recordings_ = 0;  // made so far
  Recording* making_ = nullptr;
  std::function<void(std::string const&)> log_;
  std::set<WorkKey> seen_;                       // keys seen once
  Recorded recorded_;                            // least recently used first
  std::map<WorkKey, Recorded::iterator> index_;  // of `recorded_`
};

}  // namespace tide

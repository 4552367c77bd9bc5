// A GPU as a device: one CUDA stream, its memory, and the CUDA graphs recorded on it.
//
// Work is queued the first time its key is seen, queued and recorded the second time (TensorRT requires a run between a
// change of shape and the recording), and replayed in one launch from then on. Where recording fails the device records
// no more and queues every run, which is slower: one warning in the process.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "segmented/cudart.h"
#include "segmented/device.h"

namespace tide {

// Lets CUDA, and libraries on it, use this GPU in this thread. Throws ProviderError: CUDA cannot be used, or there is no
// such GPU.
void select_gpu(int gpu);

class CudaDevice final : public Device {
 public:
  // gpu: its number. records: whether launches may be recorded; work on other streams cannot be. log: receives the
  // warning; none: stderr. Throws ProviderError, as `select_gpu`.
  explicit CudaDevice(int gpu = 0, bool records = true, std::function<void(std::string const&)> log = {});
  CudaDevice(CudaDevice const&) = delete;
  CudaDevice& operator=(CudaDevice const&) = delete;
  ~CudaDevice() override;

  cuda::Stream stream() const { return stream_; }
  bool recording() const { return recording_; }  // work is recorded now, and not run

  // Records no work from now on.
  void end_recording(std::string const& reason);

  Buffer allocate(std::size_t size) override;
  Buffer staging(std::size_t size) override;
  void upload(std::byte* target, std::byte const* source, std::size_t size) override;
  void download(std::byte* target, std::byte const* source, std::size_t size) override;
  void copy(std::byte* target, std::byte const* source, std::size_t size) override;
  void clear(std::byte* target, std::size_t size, std::size_t count, std::size_t stride) override;
  void launch(WorkKey const& key, std::function<void()> const& work) override;
  void synchronize() override;

 private:
  using Recorded = std::list<std::pair<WorkKey, cuda::GraphExec>>;

  void use() const;
  cuda::GraphExec record(std::function<void()> const& work);
  void evict();

  int gpu_;
  cuda::Stream stream_ = nullptr;
  bool records_, recording_ = false;
  std::function<void(std::string const&)> log_;
  std::set<WorkKey> seen_;                       // keys seen once
  Recorded recorded_;                            // least recently used first
  std::map<WorkKey, Recorded::iterator> index_;  // of `recorded_`
};

}  // namespace tide

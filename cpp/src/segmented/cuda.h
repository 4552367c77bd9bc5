// A lane's device on a GPU: one CUDA stream, its memory, and the CUDA graphs recorded on it.
//
// Work that comes with the same key is the same work on the same addresses: the first time it is queued as it is, the
// second time it is queued and then recorded (TensorRT asks for a run between a change of shape and the recording), and
// from then on one launch replays it. Device 0: CUDA_VISIBLE_DEVICES says which GPU that is.
#pragma once

#include <cuda_runtime_api.h>

#include <list>
#include <map>
#include <set>
#include <utility>

#include "segmented/device.h"

namespace tide {

class CudaDevice final : public Device {
 public:
  // Throws ProviderError: CUDA cannot be used.
  CudaDevice();
  CudaDevice(CudaDevice const&) = delete;
  CudaDevice& operator=(CudaDevice const&) = delete;
  ~CudaDevice() override;

  cudaStream_t stream() const { return stream_; }

  Buffer allocate(std::size_t size) override;
  Buffer staging(std::size_t size) override;
  void upload(std::byte* target, std::byte const* source, std::size_t size) override;
  void download(std::byte* target, std::byte const* source, std::size_t size) override;
  void copy(std::byte* target, std::byte const* source, std::size_t size) override;
  void clear(std::byte* target, std::size_t size, std::size_t count, std::size_t stride) override;
  void launch(WorkKey const& key, std::function<void()> const& work) override;
  void synchronize() override;

 private:
  using Recorded = std::list<std::pair<WorkKey, cudaGraphExec_t>>;

  cudaGraphExec_t record(std::function<void()> const& work);
  void make_room();

  cudaStream_t stream_ = nullptr;
  std::set<WorkKey> seen_;                        // work that came once
  Recorded recorded_;                             // the longest unused first
  std::map<WorkKey, Recorded::iterator> places_;  // among them
};

}  // namespace tide

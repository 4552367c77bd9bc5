// Declares a device, memory with a queue of work that it may record and replay, and implements it on the host; `cuda.h` has
// the GPU's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "segmented/step_decision.h"

namespace tide {

constexpr std::size_t kAlignment = 256;  // bytes; of CUDA's allocations, and required by TensorRT

// `size` bytes at `address`, zeroed when allocated and freed with the last copy of `owner`. The address of GPU memory
// must not be dereferenced.
struct Buffer {
  std::shared_ptr<void> owner;
  std::byte* address = nullptr;
  std::size_t size = 0;

  template <typename T>
  T& at(std::size_t offset) const {  // host memory alone
    return *reinterpret_cast<T*>(address + offset);
  }
};

// Identifies a piece of work: the network and what else its addresses and sizes depend on.
using WorkKey = std::array<std::int64_t, 9>;

// Work of which the device chooses parts: it does `first`, then one variant of each choice or none, then `last`.
struct ChosenWork {
  std::function<void()> first;
  std::vector<std::vector<std::function<void()>>> choices;
  std::function<void()> last;
  DecisionArguments decision;  // of choice i after what was done before it: whether segment i + 1 runs
};

// One queue of work with its memory. Calls return at once and are executed in order.
class Device {
 public:
  virtual ~Device() = default;

  // Allocates zeroed memory at an aligned address. Throws GenerationError: there is not enough.
  virtual Buffer allocate(std::size_t size) = 0;

  // Allocates host memory for `upload` and `download`, which use it without another copy.
  virtual Buffer staging(std::size_t size) = 0;

  // Copies staging memory to the device; `source` must not change until the copy has been executed.
  virtual void upload(std::byte* target, std::byte const* source, std::size_t size) = 0;

  // Copies device memory to staging memory, which may be read after `synchronize`.
  virtual void download(std::byte* target, std::byte const* source, std::size_t size) = 0;

  // Copies device memory; the ranges must not overlap.
  virtual void copy(std::byte* target, std::byte const* source, std::size_t size) = 0;

  // Zeroes `count` blocks of `size` bytes, whose starts are `stride` bytes apart.
  virtual void clear(std::byte* target, std::size_t size, std::size_t count, std::size_t stride) = 0;

  // Calls `work` to queue work, or replays a recording of it. Equal keys must mean equal work, addresses included.
  virtual void launch(WorkKey const& key, std::function<void()> const& work) = 0;

  // Records work the second time that its key is seen, if this device can choose; returns whether `replay` can do it.
  // Each part is queued once while it is recorded, so nothing that it does may have a consequence then.
  virtual bool record(WorkKey const&, std::function<ChosenWork()> const&) { return false; }

  // Does what `record` has recorded.
  virtual void replay(WorkKey const&) {}

  // Whether `launch`, and whether `record`, records work that comes again.
  virtual bool records() const { return false; }
  virtual bool decides() const { return false; }

  // Waits until all queued work is done. Throws GenerationError: queued work has failed.
  virtual void synchronize() = 0;
};

// Parts at aligned offsets of one buffer, and the same on the host, so that all are copied at once.
class Block {
 public:
  // Throws GenerationError: the device has not enough memory.
  Block(Device& device, std::vector<std::size_t> const& sizes);

  std::byte* address(std::size_t part) const { return buffer_.address + starts_[part]; }

  template <typename T>
  T* host(std::size_t part) const {
    return reinterpret_cast<T*>(host_.address + starts_[part]);
  }

  // Copy all up to the first `size` bytes of a part.
  void upload(std::size_t part, std::size_t size) const;
  void download(std::size_t part, std::size_t size) const;

 private:
  Device& device_;
  std::vector<std::size_t> starts_;
  Buffer buffer_, host_;
};

// The host. Calls are executed before they return.
class HostDevice final : public Device {
 public:
  Buffer allocate(std::size_t size) override;
  Buffer staging(std::size_t size) override { return allocate(size); }
  void upload(std::byte* target, std::byte const* source, std::size_t size) override { copy(target, source, size); }
  void download(std::byte* target, std::byte const* source, std::size_t size) override { copy(target, source, size); }
  void copy(std::byte* target, std::byte const* source, std::size_t size) override;
  void clear(std::byte* target, std::size_t size, std::size_t count, std::size_t stride) override;
  void launch(WorkKey const&, std::function<void()> const& work) override { work(); }
  void synchronize() override {}
};

}  // namespace tide

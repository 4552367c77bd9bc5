// Where a sequence's memory lives and its work is queued: the host's here, a GPU's in `cuda.h`. A device is one queue
// with memory: `Lane` allocates from it, copies within it, and hands it pieces of work that it may record and replay.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <tuple>

namespace tide {

constexpr std::size_t kAlignment = 256;  // bytes; what CUDA allocates at and TensorRT asks of an address

// `size` bytes at `address`, zeroed when allocated; freed with the last copy of `owner`. On a GPU the address is only
// for arithmetic.
struct Buffer {
  std::shared_ptr<void> owner;
  std::byte* address = nullptr;
  std::size_t size = 0;

  template <typename T>
  T& at(std::size_t offset) const {  // of memory on the host
    return *reinterpret_cast<T*>(address + offset);
  }
};

// What makes pieces of work equal: number of the network, tokens, where it reads, where it writes.
using WorkKey = std::tuple<std::size_t, std::int64_t, std::byte const*, std::byte const*>;

// One queue of work with its memory. Calls return at once and are carried out in order.
class Device {
 public:
  virtual ~Device() = default;

  // Zeroed memory at an aligned address. Throws GenerationError: there is not enough.
  virtual Buffer allocate(std::size_t size) = 0;

  // The same on the host, which `upload` and `download` reach without a copy of their own.
  virtual Buffer staging(std::size_t size) = 0;

  // Staging memory to the device; `source` must stay as it is until the queue has come to it.
  virtual void upload(std::byte* target, std::byte const* source, std::size_t size) = 0;

  // From the device to staging memory, to be read after `synchronize`.
  virtual void download(std::byte* target, std::byte const* source, std::size_t size) = 0;

  // Between places of the device that do not overlap.
  virtual void copy(std::byte* target, std::byte const* source, std::size_t size) = 0;

  // Zeroes `size` bytes at `count` places, `stride` bytes apart.
  virtual void clear(std::byte* target, std::size_t size, std::size_t count, std::size_t stride) = 0;

  // Queues what `work` queues. Of equal keys the work is equal, addresses included, so it may be recorded.
  virtual void launch(WorkKey const& key, std::function<void()> const& work) = 0;

  // Waits until everything queued is done. Throws GenerationError: something queued has failed.
  virtual void synchronize() = 0;
};

// The host: everything is done when it is called.
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

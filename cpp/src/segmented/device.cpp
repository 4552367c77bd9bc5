#include "segmented/device.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "tide/errors.h"

namespace tide {

Block::Block(Device& device, std::vector<std::size_t> const& sizes) : device_(device) {
  std::size_t total = 0;
  for (std::size_t const size : sizes) {
    starts_.push_back(total);
    total += (size + kAlignment - 1) / kAlignment * kAlignment;
  }
  buffer_ = device.allocate(total);
  host_ = device.staging(total);
}

void Block::upload(std::size_t part, std::size_t size) const {
  device_.upload(buffer_.address, host_.address, starts_[part] + size);
}

void Block::download(std::size_t part, std::size_t size) const {
  device_.download(host_.address, buffer_.address, starts_[part] + size);
}

Buffer HostDevice::allocate(std::size_t size) {
  // calloc, because the kernel provides zeroed pages only when they are written.
  std::shared_ptr<void> const memory(std::calloc(size + kAlignment, 1), std::free);
  if (memory == nullptr) {
    throw GenerationError("not enough memory for " + std::to_string(size) + " bytes of a sequence's buffers");
  }
  void* start = memory.get();
  std::size_t space = size + kAlignment;
  std::align(kAlignment, size, start, space);
  return {memory, static_cast<std::byte*>(start), size};
}

void HostDevice::copy(std::byte* target, std::byte const* source, std::size_t size) {
  std::memcpy(target, source, size);
}

void HostDevice::clear(std::byte* target, std::size_t size, std::size_t count, std::size_t stride) {
  for (std::size_t block = 0; block < count; ++block) std::memset(target + block * stride, 0, size);
}

}  // namespace tide

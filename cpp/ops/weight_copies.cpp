#include "weight_copies.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <new>

namespace tide_ops {
namespace {

constexpr std::size_t kHugePage = 2 << 20, kSlab = 32 << 20, kLine = 64, kDigestWords = 256;

// Memory that copies are cut from, one after the other; only what is used of it is taken from the system.
class Slab {
 public:
  explicit Slab(std::size_t size) : size_(size), reserved_(size + kHugePage) {
    memory_ = ::mmap(nullptr, reserved_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    void* begin = memory_;
    std::size_t space = reserved_;
    begin_ = static_cast<std::uint8_t*>(std::align(kHugePage, size, begin, space));
#ifdef MADV_HUGEPAGE
    ::madvise(begin_, size, MADV_HUGEPAGE);  // an error: the system has none
#endif
  }
  ~Slab() { ::munmap(memory_, reserved_); }
  Slab(Slab const&) = delete;
  Slab& operator=(Slab const&) = delete;

  // Null if it is full.
  std::uint8_t* take(std::size_t bytes) {
    if (bytes > size_ - used_) return nullptr;
    std::uint8_t* const taken = begin_ + used_;
    used_ += (bytes + kLine - 1) / kLine * kLine;
    return taken;
  }

 private:
  std::size_t size_, reserved_, used_ = 0;
  void* memory_;
  std::uint8_t* begin_;
};

}  // namespace

void (*forget_weights)(void const* data, std::size_t bytes) = nullptr;

std::shared_ptr<std::uint8_t> weight_memory(std::size_t bytes) {
  static std::mutex mutex;
  static auto& newest = *new std::weak_ptr<Slab>;  // some sessions end with the process
  std::lock_guard<std::mutex> const lock(mutex);
  std::shared_ptr<Slab> slab = newest.lock();
  std::uint8_t* memory = slab ? slab->take(bytes) : nullptr;
  if (memory == nullptr) {
    slab = std::make_shared<Slab>(std::max(kSlab, (bytes + kHugePage - 1) / kHugePage * kHugePage));
    memory = slab->take(bytes);
    newest = slab;
  }
  return {std::move(slab), memory};
}

WeightKey::WeightKey(void const* at, std::size_t bytes, std::initializer_list<std::int64_t> shape)
    : data(at), digest(14695981039346656037u) {
  auto const add = [this](std::uint64_t word) { digest = (digest ^ word) * 1099511628211u; };  // FNV-1a
  for (std::int64_t const size : shape) add(static_cast<std::uint64_t>(size));
  std::size_t const words = bytes / sizeof(std::uint64_t), step = std::max<std::size_t>(words / kDigestWords, 1);
  for (std::size_t i = 0; i < words; i += step) {
    std::uint64_t word;
    std::memcpy(&word, static_cast<std::uint8_t const*>(at) + i * sizeof word, sizeof word);
    add(word);
  }
}

std::shared_ptr<void const> weight_copy(WeightKey const& key, std::function<std::shared_ptr<void const>()> const& make) {
  static std::mutex mutex;
  static auto& copies = *new std::map<WeightKey, std::weak_ptr<void const>>;  // some sessions end with the process
  std::lock_guard<std::mutex> const lock(mutex);
  auto const found = copies.find(key);
  std::shared_ptr<void const> copy = found == copies.end() ? nullptr : found->second.lock();
  if (copy == nullptr) {
    for (auto at = copies.begin(); at != copies.end();) at = at->second.expired() ? copies.erase(at) : std::next(at);
    copy = make();
    copies[key] = copy;
  }
  return copy;
}

}  // namespace tide_ops

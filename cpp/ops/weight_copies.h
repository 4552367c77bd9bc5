// Copies of weights in the order in which a kernel reads them, in huge pages where the system has them: memory is then
// read up to 1.8 times as fast as from a mapped file (docs/measurements/decode.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "parallel.h"

namespace tide_ops {

// `bytes` of memory for weights, aligned to cache lines. Throws std::bad_alloc.
std::shared_ptr<std::uint8_t> weight_memory(std::size_t bytes);

// The copy that all kernels in the process share of the weights at `key`; `make` makes it if there is none. The weights
// must stay where and as they are as long as a copy is held: they are initializers.
std::shared_ptr<void const> weight_copy(void const* key, std::function<std::shared_ptr<void const>()> const& make);

// Called with weights that were copied, as nothing reads them any more; null: nothing is.
extern void (*forget_weights)(void const* data, std::size_t bytes);

inline void forget(void const* data, std::size_t bytes) {
  if (forget_weights != nullptr) forget_weights(data, bytes);
}

// Calls `copy` for all parts, in threads. Throws std::bad_alloc.
template <typename Copy>
void copy_in_parallel(Context* context, std::int64_t parts, Copy const& copy) {
  Status* const failed = in_parallel(context, parts, false, copy);
  if (failed == nullptr) return;
  api.ReleaseStatus(failed);
  throw std::bad_alloc();
}

// What a kernel holds: the copy of the weights that it read last.
template <typename Copy>
class KeptCopy {
 public:
  // make(): a shared pointer to the copy of the weights at `key`.
  template <typename Make>
  std::shared_ptr<Copy const> of(void const* key, Make const& make) {
    std::lock_guard<std::mutex> const lock(mutex_);
    if (key_ != key) {
      copy_ = std::static_pointer_cast<Copy const>(weight_copy(key, make));
      key_ = key;
    }
    return copy_;
  }

 private:
  std::mutex mutex_;
  void const* key_ = nullptr;
  std::shared_ptr<Copy const> copy_;
};

}  // namespace tide_ops

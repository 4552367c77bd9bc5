// Copies of weights in the order in which a kernel reads them, in huge pages where the system has them, so that memory is
// read up to 1.8 times as fast as in a mapped file (docs/contributing/what-did-not-pay.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>

namespace tide_ops {

// `bytes` of memory for weights, aligned to cache lines. Throws std::bad_alloc.
std::shared_ptr<std::uint8_t> weight_memory(std::size_t bytes);

// Where weights are and what they are like, so that others at the same place later are not taken for them.
struct WeightKey {
  void const* data;
  std::uint64_t digest;  // of their shape and of some of their bytes

  WeightKey(void const* at, std::size_t bytes, std::initializer_list<std::int64_t> shape);
  bool operator<(WeightKey const& other) const {
    return data != other.data ? data < other.data : digest < other.digest;
  }
};

// The copy that all kernels of the process share; `make` makes it if there is none.
std::shared_ptr<void const> weight_copy(WeightKey const& key, std::function<std::shared_ptr<void const>()> const& make);

// Called with weights that were copied, as nothing reads them any more; null: nothing is.
extern void (*forget_weights)(void const* data, std::size_t bytes);

inline void forget(void const* data, std::size_t bytes) {
  if (forget_weights != nullptr) forget_weights(data, bytes);
}

// What a kernel holds: the copy of its weights, which are initializers, so that they stay where and as they are.
template <typename Copy>
class KeptCopy {
 public:
  // key(), make(): of the weights at `data`, and a shared pointer to their copy.
  template <typename Key, typename Make>
  std::shared_ptr<Copy const> of(void const* data, Key const& key, Make const& make) {
    std::lock_guard<std::mutex> const lock(mutex_);
    if (data_ != data) {
      copy_ = std::static_pointer_cast<Copy const>(weight_copy(key(), make));
      data_ = data;
    }
    return copy_;
  }

 private:
  std::mutex mutex_;
  void const* data_ = nullptr;
  std::shared_ptr<Copy const> copy_;
};

}  // namespace tide_ops

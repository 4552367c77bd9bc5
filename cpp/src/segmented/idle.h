// Keeps unused buffers for the next sequence, batch or drafts, because they are expensive to create.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

namespace tide {

// Buffers: a type with `slots()`. May be used by several threads at once.
template <typename Buffers>
class Idle {
 public:
  // Buffers of `slots` slots or more; null: there are none, and room is kept for new ones. Smaller ones are freed.
  std::unique_ptr<Buffers> pop(std::size_t slots) {
    std::lock_guard<std::mutex> const lock(mutex_);
    auto const fits = [&](auto const& buffers) { return buffers->slots() >= slots; };
    auto const found = std::find_if(buffers_.begin(), buffers_.end(), fits);
    if (found == buffers_.end()) {
      buffers_.clear();
      buffers_.reserve(++made_);  // `push` must not throw
      return nullptr;
    }
    std::unique_ptr<Buffers> buffers = std::move(*found);
    buffers_.erase(found);
    return buffers;
  }

  void push(std::unique_ptr<Buffers> buffers) noexcept {
    std::lock_guard<std::mutex> const lock(mutex_);
    buffers_.push_back(std::move(buffers));
  }

 private:
  std::mutex mutex_;
  std::size_t made_ = 0;  // times that there were none
  std::vector<std::unique_ptr<Buffers>> buffers_;
};

}  // namespace tide

// Computes parts of something in the threads of a session.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

#include "kernel.h"

namespace tide_ops {

// What threads share that compute parts of something: a thread must not throw.
template <typename Work>
struct Parts {
  Work const& work;
  std::atomic<bool> out_of_memory{false};

  static void run(void* data, std::size_t index) {
    Parts& parts = *static_cast<Parts*>(data);
    try {
      parts.work(static_cast<std::int64_t>(index));
    } catch (std::bad_alloc const&) {
      parts.out_of_memory = true;
    }
  }
};

// Calls `work` for all indices, in threads unless it is too little for them.
template <typename Work>
Status* in_parallel(Context* context, std::int64_t count, bool little, Work const& work) {
  if (little || count < 2) {
    for (std::int64_t i = 0; i < count; ++i) work(i);
    return nullptr;
  }
  Parts<Work> parts{work};
  TIDE_RETURN_IF_FAILED(api.KernelContext_ParallelFor(context, parts.run, static_cast<std::size_t>(count), 0, &parts));
  if (parts.out_of_memory) throw std::bad_alloc();
  return nullptr;
}

}  // namespace tide_ops

// Work that the threads of a session do together. They meet between its phases, not between operators: once for all of
// it they are asked to come, and one that comes late, or never, is waited for by none.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <new>
#include <thread>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernel.h"

namespace tide_ops {

// Memory that a phase reads from one end to the other, part by part.
struct Reading {
  char const* begin = nullptr;
  std::int64_t bytes = 0;
};

class Phases {
 public:
  // Adds `count` parts, which threads do in any order once all phases before are done. A part may throw std::bad_alloc.
  // Who waits for such a phase prefetches what it will read.
  template <typename Part>
  void add(std::int64_t count, Part part, Reading reading = {}) {
    phases_.emplace_back(count, std::move(part), reading);
  }

  // Does all; `alone`: in this thread, as it is too little for others.
  Status* run(Context* context, bool alone) {
    constexpr std::size_t kMost = 256;  // threads; each calls `join` some times
    if (alone) {
      join(this, 0);
    } else {
      TIDE_RETURN_IF_FAILED(api.KernelContext_ParallelFor(context, join, kMost, 0, this));
    }
    if (out_of_memory_) throw std::bad_alloc();
    return nullptr;
  }

 private:
  // Parts of a phase that are still to do, from a thread's own on: it takes the first, others that have none left the
  // last. So each thread reads memory from one end to the other.
  class Share {
   public:
    bool take(std::int64_t begin, std::int64_t end, bool first, std::int64_t& part) {
      std::uint64_t left = left_.load(std::memory_order_relaxed), rest;
      do {
        if (left == kUntouched &&
            left_.compare_exchange_strong(left, packed(begin, end), std::memory_order_relaxed)) {
          left = packed(begin, end);
        }
        std::uint64_t const from = left >> 32, to = left & 0xffffffff;
        if (from >= to) return false;
        part = static_cast<std::int64_t>(first ? from : to - 1);
        rest = first ? left + (std::uint64_t{1} << 32) : left - 1;
      } while (!left_.compare_exchange_weak(left, rest, std::memory_order_relaxed));
      return true;
    }

   private:
    static constexpr std::uint64_t kUntouched = ~std::uint64_t{0};
    static std::uint64_t packed(std::int64_t begin, std::int64_t end) {
      return static_cast<std::uint64_t>(begin) << 32 | static_cast<std::uint64_t>(end);
    }

    alignas(64) std::atomic<std::uint64_t> left_{kUntouched};
  };

  static constexpr std::int64_t kShares = 8;  // at most; of more threads some begin with the same one

  struct Phase {
    Phase(std::int64_t parts, std::function<void(std::int64_t)> work, Reading of_weights)
        : part(std::move(work)), count(parts), reading(of_weights) {}

    std::function<void(std::int64_t)> const part;
    std::int64_t const count;
    Reading const reading;
    std::atomic<std::int64_t> shares{0};  // as many as threads had come when the first one began
    Share left[kShares];
    alignas(64) std::atomic<std::int64_t> done{0};
  };

  static void join(void* data, std::size_t) {
    Phases& all = *static_cast<Phases*>(data);
    if (all.finished_) return;
    std::int64_t const rank = all.threads_.fetch_add(1);
    for (auto phase = all.phases_.begin(); phase != all.phases_.end(); ++phase) {
      all.help(*phase, rank);
      all.wait(phase, rank);
    }
    all.finished_ = true;
  }

  void help(Phase& phase, std::int64_t rank) {
    std::int64_t shares = 0, most = std::max<std::int64_t>(std::min({threads_.load(), kShares, phase.count}), 1);
    if (phase.shares.compare_exchange_strong(shares, most)) shares = most;
    for (std::int64_t i = 0; i < shares; ++i) {
      std::int64_t const share = (rank + i) % shares;
      std::int64_t const begin = share * phase.count / shares, end = (share + 1) * phase.count / shares;
      for (std::int64_t part; phase.left[share].take(begin, end, i == 0, part);) {
        try {
          phase.part(part);
        } catch (std::bad_alloc const&) {
          out_of_memory_ = true;
        }
        phase.done.fetch_add(1, std::memory_order_release);
      }
    }
  }

  // Until all parts of the phase are done.
  void wait(std::deque<Phase>::iterator phase, std::int64_t rank) {
    constexpr int kSpins = 2000;  // some 50 microseconds; after them the others may lack a core
    constexpr std::int64_t kLine = 64, kLines = 4, kMost = 64 << 10;
    char const *next = nullptr, *end = nullptr;
    for (int spins = 0; phase->done.load(std::memory_order_acquire) < phase->count; ++spins) {
      if (spins == 0) {
        auto reader = std::next(phase);
        while (reader != phases_.end() && reader->reading.begin == nullptr) ++reader;
        if (reader != phases_.end()) {
          std::int64_t const shares = std::min({threads_.load(), kShares, reader->count});
          next = reader->reading.begin + reader->reading.bytes * (rank % shares) / shares;
          end = std::min(next + kMost, reader->reading.begin + reader->reading.bytes);
        }
      } else if (next < end) {
        for (std::int64_t line = 0; line < kLines; ++line, next += kLine) __builtin_prefetch(next, 0, 2);
      } else if (spins < kSpins) {
        pause();
      } else {
        std::this_thread::yield();
      }
    }
  }

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  std::deque<Phase> phases_;
  std::atomic<std::int64_t> threads_{0};  // that have come
  std::atomic<bool> finished_{false}, out_of_memory_{false};
};

}  // namespace tide_ops

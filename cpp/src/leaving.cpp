#include "leaving.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace tide {
namespace {

std::atomic<int> inside{0};  // threads
std::atomic<bool> ends{false};
thread_local int depth = 0;  // a callback may call the library
thread_local bool leaves = false;

// A forked child has this thread alone.
[[maybe_unused]] int const kForked = ::pthread_atfork(nullptr, nullptr, [] {
  inside = depth > 0 ? 1 : 0;
  ends = false;
});

}  // namespace

Inside::Inside(Otherwise otherwise) noexcept {
  if (depth++ > 0) return;
  ++inside;  // then `ends` is read: `leave`, which does this in the other order, waits for this thread, or it stays outside
  if (!ends || leaves) return;
  --depth;
  --inside;
  admitted_ = false;
  while (otherwise == wait) ::pause();
}

Inside::~Inside() {
  if (admitted_ && --depth == 0) --inside;
}

bool leave(double seconds) noexcept {
  leaves = true;
  ends = true;
  auto const last = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (inside > (depth > 0 ? 1 : 0)) {
    if (std::chrono::steady_clock::now() > last) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace tide

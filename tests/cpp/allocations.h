// Fails one allocation of a call, or one of its calls of ONNX Runtime, to test what that leaves behind.
#pragma once

#include <cstdint>

// The allocation of this number, from 1, fails in the next call of `injected` in this thread. Counted are `new` and
// `calloc` in tide_runtime, the memory of ONNX Runtime's tensors, and calls of ONNX Runtime, which are mostly the first
// to fail in there. Its own `new` is not: it does not survive that. again: if above 0, the allocation of this number
// after it fails too.
void fail_allocation(std::int64_t number, std::int64_t again);

// Whether it did, in the last call of `injected`.
bool allocation_failed();

void begin_injection();
void end_injection();

template <typename F>
auto injected(F const& call) {
  struct Injection {
    Injection() { begin_injection(); }
    ~Injection() { end_injection(); }
  } const injection;
  return call();
}

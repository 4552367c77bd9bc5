// Fails one allocation of a call, or one of its calls of ONNX Runtime, to see what that leaves behind.
#pragma once

#include <cstdint>

// From now on the allocation of this number, from 1, fails in this thread, and the one of number `again` after it, if that
// is above 0. Counted are `new` and `calloc` of the runtime, the memory of ONNX Runtime's tensors, and calls of ONNX
// Runtime, which are mostly the first to fail in there. Its own `new` is not: it does not survive that.
void fail_allocation(std::int64_t number, std::int64_t again = 0);

// Lets no allocation fail any more. Returns whether one has.
bool end_failures();

// Runs a kernel on a CPU, each of its threads a fibre: what the stand-ins for CUDA's headers are made of.
//
// A fibre runs until a barrier, a look at a counter, or its end. As many blocks as the GPU takes are there at a time; they, and
// the threads of a block, take turns in an order that a seed shuffles. Reported, and the launch fails: a barrier that not all
// reach, blocks that look at counters which nobody changes, and what races.cpp finds.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fibres {

struct Dim3 {
  unsigned x, y, z;
  Dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct Registers {  // of the thread that runs
  Dim3 thread, block, grid;
};
extern Registers registers;

// A kernel with its arguments.
struct Code {
  void (*run)(void* arguments);
  void* arguments;
  size_t size;
};

enum Barrier { kNone, kBlock, kLook, kEnd };

void wait(Barrier at);
void fence();
void* shared();  // of the block

// Counters in global memory, which one thread changes at a time.
unsigned look(const unsigned* counter);
void changing(const unsigned* counter);
template <class Change>
__attribute__((no_sanitize("thread"))) unsigned change(unsigned* counter, Change to) {
  changing(counter);
  const unsigned old = *counter;
  *counter = to(old);
  return old;
}

// For kernels that do without a barrier (kernel_barriers.py): whether a statement is there; what ends the next phase.
bool kept(int site);
void ends_phase(int site);

}  // namespace fibres

namespace tide {

struct Emulation {  // tide_kernels_emulate
  uint64_t order = 0;
};
Emulation& emulation();

}  // namespace tide

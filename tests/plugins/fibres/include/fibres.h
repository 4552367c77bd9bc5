// Runs a kernel on a CPU, each of its threads a fibre: what the stand-ins for CUDA's headers are made of.
//
// A fibre runs until a barrier, or its end. Blocks, and threads of a block, take turns in an order that a seed
// shuffles. Reported, and the launch fails: a barrier that not all reach, blocks that wait for blocks that have ended,
// and what races.cpp finds.
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

enum Barrier { kNone, kBlock, kCluster, kGrid, kEnd };

void wait(Barrier at);
void wait_for_kernel_before();
void* shared();                        // of the block
void* shared_of(void* own, int rank);  // the same place in the memory of another block of the cluster

// For kernels that do without a barrier (kernel_barriers.py): whether a statement is there; what ends the next phase or
// stage.
bool kept(int site);
void ends_phase(int site);
void ends_stage(int site);

}  // namespace fibres

namespace tide {

struct Emulation {  // tide_kernels_emulate
  uint64_t order = 0;
  int compute_capability = 8;
};
Emulation& emulation();

}  // namespace tide

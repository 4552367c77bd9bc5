// What fibres.cpp, launches.cpp and races.cpp know of each other.
#pragma once

#include <cstdint>
#include <string>

#include "fibres.h"

namespace fibres {

struct Launch {
  unsigned blocks, threads, cluster;  // cluster: its blocks; 1, there are none
  size_t shared;                      // bytes of each block
  bool cooperative;
  bool overlaps;  // the kernel before it
};

// A barrier of the block, of the cluster or of the grid makes the count of its own new, and of those within it.
struct Epoch {
  uint32_t grid, cluster, block;
};

struct Block {
  unsigned number, cluster;
  char* shared;
  Epoch epoch;
  uint32_t seen_by_others;  // the cluster's epoch in which another block last touched its shared memory
  bool ended;
};

struct Thread {
  void* stack;  // where it goes on
  void* fake_stack;  // the address sanitizer's
  Barrier at;
  int ends_phase, ends_stage;  // the site of the next barrier
  bool inputs_are_there;
};

struct Memory {
  char* begin = nullptr;
  size_t size = 0;
  bool holds(uintptr_t at) const { return at - reinterpret_cast<uintptr_t>(begin) < size; }
};

struct Machine {
  Launch launch;
  Code code;
  Memory stacks, shared;
  size_t shared_stride;  // from one block's to the next's
  Block* blocks;         // those that are resident
  Block* block = nullptr;  // that runs
  Thread* thread = nullptr;
  bool running = false;
  int mutant = 0;
  std::string problem;  // the first
  void (*forget_shared)() = [] {};  // races.cpp
};
extern Machine machine;

void report(const std::string& problem);
std::string name_of(const Block& block);

// Runs the launch's blocks; those of a cluster, or all of a cooperative launch, at the same time.
void run(const Launch& launch, Code code);

}  // namespace fibres

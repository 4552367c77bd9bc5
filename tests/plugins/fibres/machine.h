// What fibres.cpp, launches.cpp and races.cpp know of each other.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "fibres.h"

namespace fibres {

struct Launch {
  unsigned blocks, threads;
  size_t shared;  // bytes of each block
};

// By block of the launch: that what it did before this epoch of its own has happened. A barrier begins a block's next epoch.
using Clock = std::vector<uint32_t>;

struct Block {
  unsigned number;
  char* shared;
  uint32_t epoch;
  Clock knows;  // of others
};

struct Thread {
  void* stack;  // where it goes on
  void* fake_stack;  // the address sanitizer's
  Barrier at;
  int ends_phase;      // the site of the next barrier
  Clock fenced, heard;  // what it may tell by a counter; what counters have told it, before a fence
  Clock learned;       // after one: for the block from its next barrier on
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
  uint32_t number = 0;   // of the launch
  unsigned resident = 64;  // blocks at a time
  bool running = false;
  int mutant = 0;
  std::string problem;  // the first
  void (*forget_shared)() = [] {};  // races.cpp
};
extern Machine machine;

void report(const std::string& problem);
std::string name_of(const Block& block);

void run(const Launch& launch, Code code);

}  // namespace fibres

#include "world.h"

#include <cstdlib>
#include <filesystem>
#include <new>

#include "machine.h"
#include "memory_limit.h"
#include "onnxruntime/operators.h"
#include "table.h"

namespace simulation {

std::int64_t machine_bytes = 1 << 20;
std::int64_t allocations_left = -1;

std::uint64_t Random::word() {
  state_ += 0x9E3779B97F4A7C15;
  return table::mix(state_, 0);
}

}  // namespace simulation

namespace tide {

double seconds_now() { return table_control.clock; }
std::uint64_t random_seed() { return static_cast<std::uint64_t>(table_control.runs); }

std::string machine_name() { return "simulated"; }

std::size_t machine_memory() { return static_cast<std::size_t>(simulation::machine_bytes); }
std::size_t memory_limit() { return machine_memory(); }
std::size_t memory_left() { return std::size_t{1} << 40; }

void register_operators(Ort::SessionOptions&) {}  // the table has none

}  // namespace tide

void* operator new(std::size_t size) {
  if (simulation::allocations_left >= 0 && simulation::allocations_left-- == 0) throw std::bad_alloc();
  if (void* const memory = std::malloc(size > 0 ? size : 1)) return memory;
  throw std::bad_alloc();
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

// What a simulation has in place of the machine: virtual time, little memory, and allocations that fail when they are told to.
#pragma once

#include <cstdint>

namespace simulation {

// Random numbers that depend on the seed alone.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t word();
  std::int64_t below(std::int64_t count) { return static_cast<std::int64_t>(word() % static_cast<std::uint64_t>(count)); }
  bool one_in(std::int64_t count) { return below(count) == 0; }

  template <typename T, std::size_t N>
  T of(T const (&values)[N]) {
    return values[static_cast<std::size_t>(below(N))];
  }

 private:
  std::uint64_t state_;
};

extern std::int64_t machine_bytes;     // of memory, for pools that are made
extern std::int64_t allocations_left;  // until one fails, which is the only one; below 0: none does

}  // namespace simulation

// What a machine gives differently each time: the time, and random numbers. A program that simulates replaces them.
#pragma once

#include <cstdint>
#include <string>

namespace tide {

// Seconds since some moment, never less than before: of deadlines, statistics and measurements.
double seconds_now();

// A number that nobody can foresee, for what is to be random without a seed.
std::uint64_t random_seed();

// The processors, for what is measured on one machine and is not true of another.
std::string machine_name();

}  // namespace tide

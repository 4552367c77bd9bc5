// Finds how much memory this process may have: the machine's, or what its control groups (cgroup v1 and v2) leave.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

namespace tide {

// The least limit in bytes; `machine` where no group has a lower one. groups: the text of /proc/self/cgroup. root: where
// control groups are mounted.
std::size_t memory_limit(std::string const& groups, std::filesystem::path const& root, std::size_t machine);

// Of this process.
std::size_t memory_limit();

// Of the machine.
std::size_t machine_memory();

// How much of it is not used yet, by this process.
std::size_t memory_left();

}  // namespace tide

#include "machine.h"

#include <sys/utsname.h>

#include <chrono>
#include <fstream>
#include <random>
#include <set>
#include <thread>

namespace tide {

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::uint64_t random_seed() {
  std::random_device device;
  return std::uint64_t{device()} << 32 | device();
}

std::string machine_name() {
  ::utsname system{};
  ::uname(&system);
  std::string name = std::string(system.sysname) + " " + system.machine + ", " +
                     std::to_string(std::thread::hardware_concurrency()) + " threads";
  std::ifstream processors("/proc/cpuinfo");  // of Linux; all processors are alike
  std::set<std::string> seen;
  for (std::string line; std::getline(processors, line);) {
    std::string const key = line.substr(0, line.find_first_of("\t:"));
    bool const names = key == "model name" || key == "flags" || key == "CPU implementer" || key == "CPU part" ||
                       key == "Features" || key == "cache size";
    if (names && seen.insert(key).second) name += ", " + line;
  }
  return name;
}

}  // namespace tide

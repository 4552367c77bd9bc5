#include "memory_limit.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

namespace tide {
namespace {

namespace fs = std::filesystem;

std::size_t page_bytes() { return static_cast<std::size_t>(::sysconf(_SC_PAGE_SIZE)); }

// The least of the numbers in files of this name in a folder and those above it, up to `root`; "max" is none.
std::size_t least(fs::path const& root, fs::path folder, char const* name, std::size_t most) {
  for (folder = folder.relative_path();; folder = folder.parent_path()) {
    std::size_t bytes = 0;
    if (std::ifstream(root / folder / name) >> bytes) most = std::min(most, bytes);
    if (folder.empty()) return most;
  }
}

}  // namespace

std::size_t memory_limit(std::string const& groups, fs::path const& root, std::size_t machine) {
  std::size_t most = machine;
  std::istringstream lines(groups);
  for (std::string line; std::getline(lines, line);) {  // such as "4:cpu,memory:/service", or "0::/service" of version 2
    std::size_t const first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    std::string const controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    fs::path const folder = line.substr(second + 1);
    if (controllers == ",,") {
      most = least(root, folder, "memory.max", most);
      most = least(root / "unified", folder, "memory.max", most);
    } else if (controllers.find(",memory,") != std::string::npos) {
      most = least(root / "memory", folder, "memory.limit_in_bytes", most);
    }
  }
  return most;
}

std::size_t machine_memory() { return static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) * page_bytes(); }

std::size_t memory_limit() {
  std::ifstream file("/proc/self/cgroup");
  std::ostringstream groups;
  if (file) groups << file.rdbuf();
  return memory_limit(groups.str(), "/sys/fs/cgroup", machine_memory());
}

std::size_t memory_left() {
  std::size_t size = 0, resident = 0;  // in pages
  std::ifstream("/proc/self/statm") >> size >> resident;
  std::size_t const limit = memory_limit();
  return limit - std::min(limit, resident * page_bytes());
}

}  // namespace tide

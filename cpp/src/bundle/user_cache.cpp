#include "bundle/user_cache.h"

#include <cstdlib>

namespace tide {

std::filesystem::path user_cache() {
  char const* const cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && *cache != '\0') return std::filesystem::path(cache) / "tide_export";
  char const* const home = std::getenv("HOME");
  if (home != nullptr && *home != '\0') return std::filesystem::path(home) / ".cache" / "tide_export";
  return {};
}

}  // namespace tide

#include "bundle/user_cache.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <utility>
#include <vector>

namespace tide {

namespace fs = std::filesystem;

fs::path user_cache() {
  char const* const cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && *cache != '\0') return fs::path(cache) / "tide_export";
  char const* const home = std::getenv("HOME");
  if (home != nullptr && *home != '\0') return fs::path(home) / ".cache" / "tide_export";
  return {};
}

void replace_cached(fs::path const& file, std::string const& content) {
  std::error_code ignored;
  fs::create_directories(file.parent_path(), ignored);
  std::string part = file.string() + "XXXXXX";
  int const descriptor = mkstemp(part.data());
  if (descriptor < 0) return;
  close(descriptor);
  std::ofstream out(part, std::ios::binary);
  out << content;
  out.close();
  if (!out || std::rename(part.c_str(), file.c_str()) != 0) fs::remove(part, ignored);
}

void keep_newest(fs::path const& folder, std::size_t count) {
  std::vector<std::pair<fs::file_time_type, fs::path>> files;
  for (fs::path const& file : fs::directory_iterator(folder)) files.emplace_back(fs::last_write_time(file), file);
  if (files.size() <= count) return;
  auto const kept = files.end() - static_cast<std::ptrdiff_t>(count);
  std::nth_element(files.begin(), kept, files.end());
  std::for_each(files.begin(), kept, [](auto const& old) { fs::remove(old.second); });
}

}  // namespace tide

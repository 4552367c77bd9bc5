#include "bundle/verification.h"

#include <filesystem>
#include <fstream>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "bundle/sha256.h"
#include "bundle/user_cache.h"

namespace tide {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kLarge = 4 << 20;  // bytes; smaller files are hashed in milliseconds, and each time
constexpr std::size_t kKept = 1000;       // notes; a file whose note is gone is hashed again

// The empty file that says that `file` was verified; none where there is no home.
fs::path note_of(BundleFile const& file, FileInfo const& expected) {
  fs::path const folder = user_cache();
  if (folder.empty()) return {};
  return folder / "verified" / sha256_of(file.identity() + " " + expected.sha256);
}

void verify(BundleFile const& file, FileInfo const& expected) {
  fs::path const note = note_of(file, expected);  // before: a file that is written meanwhile has another one
  file.check(expected, true);
  if (note.empty()) return;
  try {
    fs::create_directories(note.parent_path());
    std::ofstream(note, std::ios::app);
    keep_newest(note.parent_path(), kKept);
  } catch (fs::filesystem_error const&) {  // it is then hashed again the next time
  }
}

}  // namespace

Verification::Verification(Bundle const& bundle) {
  std::vector<std::pair<std::shared_ptr<BundleFile const>, FileInfo>> large;
  for (auto const& [name, expected] : bundle.manifest.files) {
    std::shared_ptr<BundleFile const> const& file = bundle.files.at(name);
    std::error_code ignored;
    if (expected.size < kLarge) {
      file->check(expected, true);
    } else if (fs::path const note = note_of(*file, expected); note.empty() || !fs::exists(note, ignored)) {
      large.emplace_back(file, expected);
    }
  }
  if (large.empty()) return;
  large_ = std::async(std::launch::async, [large = std::move(large)] {
    for (auto const& [file, expected] : large) verify(*file, expected);
  });
}

void Verification::wait() {
  if (large_.valid()) large_.get();
}

}  // namespace tide

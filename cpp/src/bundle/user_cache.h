// Finds the user's cache folder, the one that tide_export/common/files.py uses. Its files may be deleted at any time.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

namespace tide {

// Empty where there is no home.
std::filesystem::path user_cache();

// Replaces a file of the cache by one of this content, so that readers see the old or the new one; none where it cannot be
// written.
void replace_cached(std::filesystem::path const& file, std::string const& content);

// Removes all but so many files of a folder, those that were written last. Throws std::filesystem::filesystem_error.
void keep_newest(std::filesystem::path const& folder, std::size_t count);

}  // namespace tide

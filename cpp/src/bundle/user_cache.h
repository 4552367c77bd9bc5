// Finds the user's cache folder, the one that tide_export/common/files.py uses. Its files may be deleted at any time.
#pragma once

#include <filesystem>

namespace tide {

// Empty where there is no home.
std::filesystem::path user_cache();

}  // namespace tide

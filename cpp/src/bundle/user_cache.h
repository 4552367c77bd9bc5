// The user's folder for what may be deleted at any time: it is then verified or compiled again. The Python package's too
// (tide_export/files.py).
#pragma once

#include <filesystem>

namespace tide {

// Empty where there is no home.
std::filesystem::path user_cache();

}  // namespace tide

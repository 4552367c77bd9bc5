// Finds and checks the library of TensorRT plugins. Opening a library runs its code, so it is never loaded from a bundle: the
// user names it. A child process reads its version, so that a damaged library cannot crash this process. Messages are those
// of tide_export/runtime/tensorrt/plugins.py.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "bundle/store.h"

namespace tide {

constexpr char const* kCopiedBytes = "tide_plugins_copied_bytes";  // in plugins/common/registry.cpp

// A library of this release.
struct PluginLibrary {
  std::filesystem::path path;
  std::string version;   // release of tide_export it belongs to
  std::string tensorrt;  // version of TensorRT's headers it was compiled with
  std::string sha256;    // of the file
};

// The library at `path`, else at the path in the variable TIDE_PLUGINS; none: neither is set, or it is kNoPlugins.
// Throws ProviderError: the library does not exist, cannot be opened, is no plugin library, or is of another release.
std::optional<PluginLibrary> find_plugins(std::optional<std::filesystem::path> const& path);

// The library for the bundle's plans in this `version` of TensorRT. path: as for `find_plugins`. log: receives a
// sentence if it is another build than theirs. Throws ProviderError: there is none, or it is of another release or for
// another major version of TensorRT.
PluginLibrary plugins_to_load(Bundle const& bundle, std::string const& version,
                              std::optional<std::filesystem::path> const& path,
                              std::function<void(std::string const&)> const& log);

}  // namespace tide

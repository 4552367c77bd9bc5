// The library of TensorRT plugins: where it is found, and whether it is ours and fits. A library is native code that
// runs when it is opened, so none is ever taken out of a bundle: it is named. It is asked for its version in a process
// of its own, so that a damaged one cannot take this one down. The sentences are those of
// tide_export/runtime/tensorrt/plugins.py.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "bundle/store.h"

namespace tide {

// A library of this release.
struct PluginLibrary {
  std::filesystem::path path;
  std::string version;   // the release of tide_export it belongs to
  std::string tensorrt;  // the version of TensorRT's headers it was compiled with
  std::string sha256;    // of the file
};

// The library that is given, else that of the variable TIDE_PLUGINS; none: neither names one, or it is kNoPlugins.
// Throws ProviderError: what is named is not there, cannot be opened, is no plugin library, or is of another release.
std::optional<PluginLibrary> find_plugins(std::optional<std::filesystem::path> const& given);

// The library that the bundle's engines need in this `version` of TensorRT. `log` is told where it is another build
// than theirs. Throws ProviderError: there is none, or it is of another release or for another major version of
// TensorRT.
PluginLibrary plugins_to_load(Bundle const& bundle, std::string const& version,
                              std::optional<std::filesystem::path> const& given,
                              std::function<void(std::string const&)> const& log);

}  // namespace tide

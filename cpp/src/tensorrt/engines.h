// The bundle's TensorRT engines as a session. `tensorrt.cpp` opens them; a library that is built without TensorRT has
// `no_tensorrt.cpp` in its place, which says so.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "backend.h"

namespace tide {

constexpr char const* kNoPlugins = "none";  // instead of a library

bool is_flavour(std::string const& name);         // "tensorrt", "tensorrt-rtx"
std::string title_of(std::string const& flavour);  // for people

// What the manifest alone says: are there engines of this flavour, and are they this model's? Throws ProviderError:
// there are none. BundleError: they were built from other weights.
void check_engines(Bundle const& bundle, std::string const& flavour);

// Whether a machine has what the engines were built for: a version of the library, and a GPU of a compute capability
// ({0, 0}: there is none). Throws ProviderError.
struct ComputeCapability {
  int major = 0, minor = 0;
};
void check_machine(Bundle const& bundle, std::string const& version, ComputeCapability device);

// The engines, ready to run.
//
// plugins: the library of plugins, for engines that hold some; none: as `find_plugins`.
// log: is told that a plugin library is another build than theirs.
//
// Throws ProviderError: the bundle has no engines of that flavour, or they cannot run here, and what to do about it.
// BundleError: the engines are not the manifest's.
std::shared_ptr<Session> open_engines(Bundle bundle, std::string const& flavour,
                                      std::optional<std::filesystem::path> const& plugins,
                                      std::function<void(std::string const&)> const& log);

}  // namespace tide

// Opens the bundle's TensorRT plans as a backend: in `trt_networks.cpp` if the library was built with TensorRT, else
// `no_tensorrt.cpp` throws.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "sequence.h"

namespace tide {

constexpr char const* kNoPlugins = "none";  // as the plugin library: none

bool is_flavour(std::string const& name);         // "tensorrt", "tensorrt-rtx"
bool has_drafter_plan(Manifest const& manifest);  // which `tide-export build` makes, later than the drafter
std::string title_of(std::string const& flavour);  // the product's name

// Checks that the bundle has plans of this flavour, built from its model's weights. Throws ProviderError: it has
// none. BundleError: they were built from other weights.
void check_plans(Bundle const& bundle, std::string const& flavour);

struct ComputeCapability {
  int major = 0, minor = 0;  // {0, 0}: no GPU
};

// Throws ProviderError unless the plans were built for this version of the library and this GPU.
void check_machine(Bundle const& bundle, std::string const& version, ComputeCapability device);

// Opens the plans.
//
// plugins: the plugin library, for plans that hold plugins; none: as `find_plugins`.
// log: receives a sentence if the plugin library is another build than the plans were built with.
// gpu: the number of the GPU to run on.
//
// Throws ProviderError: the bundle has no plans of that flavour, or they cannot run here, and what to do about it.
// BundleError: the plans do not match the manifest.
std::shared_ptr<Backend> open_plans(Bundle bundle, std::string const& flavour,
                                      std::optional<std::filesystem::path> const& plugins,
                                      std::function<void(std::string const&)> const& log, int gpu = 0);

}  // namespace tide

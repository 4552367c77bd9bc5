// Opens the bundle on disk: reads its manifest and checks its files.
#pragma once

#include <filesystem>

#include "tide/manifest.h"

namespace tide {

constexpr char const* kManifestFile = "tide.json";
constexpr char const* kGraphFile = "model.onnx";

struct Bundle {
  std::filesystem::path path;
  Manifest manifest;
};

// Reads the manifest and checks the size and, if `verify`, the sha256 of every file it lists. Throws BundleError: not a
// bundle, a manifest this release cannot read, or a file missing, truncated or corrupt.
Bundle open_bundle(std::filesystem::path const& path, bool verify);

}  // namespace tide

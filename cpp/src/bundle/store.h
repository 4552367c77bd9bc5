// The bundle on disk: its manifest read, its files checked against it.
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

// Reads the manifest and checks that every file it lists is there, with its size and, if `verify`, its sha256. Throws
// BundleError: not a bundle, a manifest this release cannot read, or a file missing, truncated or corrupt.
Bundle open_bundle(std::filesystem::path const& path, bool verify);

}  // namespace tide

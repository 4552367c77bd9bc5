#include "bundle/store.h"

#include <fstream>
#include <iterator>
#include <system_error>

#include "bundle/sha256.h"
#include "formatting.h"
#include "tide/errors.h"

namespace tide {
namespace {

namespace fs = std::filesystem;

constexpr char const* kAdvice = "; export the bundle again or copy it anew";

void check_file(fs::path const& file, FileInfo const& expected, bool verify) {
  std::error_code error;
  fs::file_status const status = fs::status(file, error);
  if (status.type() == fs::file_type::not_found)
    throw BundleError("bundle file " + quoted(file) + " is missing" + kAdvice);
  if (error) throw BundleError("cannot read bundle file " + quoted(file) + ": " + error.message());
  if (!fs::is_regular_file(status)) throw BundleError("bundle file " + quoted(file) + " is not a file");
  auto const size = static_cast<std::int64_t>(fs::file_size(file, error));
  if (error) throw BundleError("cannot read bundle file " + quoted(file) + ": " + error.message());
  std::string const actual = std::to_string(size), listed = std::to_string(expected.size);
  if (size < expected.size) {
    throw BundleError("bundle file " + quoted(file) + " is truncated: " + actual + " of " + listed + " bytes" +
                      kAdvice);
  }
  if (size > expected.size) {
    throw BundleError("bundle file " + quoted(file) + " has " + actual + " bytes instead of " + listed + kAdvice);
  }
  if (!verify) return;
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw BundleError("cannot read bundle file " + quoted(file) + ": it cannot be opened");
  if (sha256(stream) != expected.sha256) {
    throw BundleError("bundle file " + quoted(file) + " is corrupt: its sha256 is not the manifest's" + kAdvice);
  }
}

}  // namespace

Bundle open_bundle(fs::path const& path, bool verify) {
  std::error_code error;
  if (!fs::exists(path, error)) throw BundleError("bundle " + quoted(path) + " does not exist");
  fs::path const file = path / kManifestFile;
  if (!fs::is_regular_file(file, error)) {
    throw BundleError(quoted(path) + " is not a bundle: it has no " + kManifestFile);
  }
  std::ifstream stream(file, std::ios::binary);
  std::string const text(std::istreambuf_iterator<char>(stream), {});
  if (!stream.is_open() || stream.bad()) throw BundleError("cannot read " + quoted(file) + ": it cannot be opened");
  Bundle bundle{path, Manifest::from_json(text, quoted(file))};
  for (auto const& [name, expected] : bundle.manifest.files) check_file(path / name, expected, verify);
  return bundle;
}

}  // namespace tide

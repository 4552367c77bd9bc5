// Opens a bundle: reads its manifest, checks its files and holds them open. An engine reads some files much later, such as
// the drafter for the first request that drafts. It reads them from the descriptors, so replacing, moving or deleting
// the folder has no effect on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "tide/manifest.h"

namespace tide {

constexpr char const* kManifestFile = "tide.json";
constexpr char const* kDrafterFile = "drafter.onnx";
constexpr char const* kWeightsFile = "model.onnx.data";
constexpr char const* kSegmentsWeightsFile = "segments/weights.data";
constexpr char const* kEmbeddingFile = "segments/embedding.data";  // the matrix of the networks' input `embedding`

// A file's content as read-only memory.
class Mapping {
 public:
  Mapping(void* data, std::size_t size);
  ~Mapping();
  Mapping(Mapping const&) = delete;
  Mapping& operator=(Mapping const&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::size_t size() const { return size_; }

  // Takes the pages out of the process's memory until they are read again.
  void forget_pages() const { forget_part(data_, size_); }

  // The same for a part of any mapping; nothing if `part` is in none.
  static void forget(void const* part, std::size_t bytes);

 private:
  void forget_part(void const* part, std::size_t bytes) const;

  void* data_;
  std::size_t size_;
};

// A file of a bundle, open for reading. It stays readable and the same when its folder is replaced, moved or deleted.
// What overwrites it in place is noticed by its size and modification time; not noticed are changes that restore both.
// May be used by several threads at once.
class BundleFile {
 public:
  // Duplicates the descriptor of an open file. `path` is for messages. Throws BundleError: it is not a regular file.
  BundleFile(std::filesystem::path path, int descriptor);
  ~BundleFile();
  BundleFile(BundleFile const&) = delete;
  BundleFile& operator=(BundleFile const&) = delete;

  std::filesystem::path const& path() const { return path_; }
  std::int64_t size() const { return size_; }  // bytes, when it was opened

  // Device, inode, size and times of modification and change as they are now: another content has another.
  std::string identity() const;

  // The whole content. Throws BundleError: it was changed since it was opened, or cannot be read.
  std::string read() const;

  // The content as memory, one for all callers, until they drop it; they call `check_unchanged` before. The process dies
  // (SIGBUS) if something truncates the file meanwhile. Throws BundleError as `read`.
  std::shared_ptr<Mapping const> map() const;

  // Throws BundleError: it was changed since it was opened.
  void check_unchanged() const;

  // Compares it with the manifest's record: the size, and the sha256 if `verify`. Throws BundleError.
  void check(FileInfo const& expected, bool verify) const;

 private:
  // Fills `to` from `at` on; fewer bytes at the end of the file.
  std::size_t read_at(char* to, std::size_t size, std::uint64_t at) const;

  std::filesystem::path path_;
  int descriptor_ = -1;
  std::int64_t size_ = 0, seconds_ = 0, nanoseconds_ = 0;  // when it was opened
  mutable std::mutex mutex_;
  mutable std::weak_ptr<Mapping const> mapping_;
};

// path: where it was opened, for messages: another bundle may be there by now. files: those of the manifest, by name.
struct Bundle {
  std::filesystem::path path;
  std::string manifest_text;  // tide.json
  Manifest manifest;
  std::map<std::string, std::shared_ptr<BundleFile const>> files;

  // One of the bundle's files. Throws BundleError: the manifest lists no such file.
  BundleFile const& file(std::string const& name) const;

  // Throws BundleError: the file of the weights, which sessions share, was changed since it was opened.
  void check_weights() const;
};

// Reads the manifest and opens every file it lists, with its size and, if `verify`, its sha256 checked; all of them
// from one folder, also while an export replaces the bundle; or `opened`, and then opens none. Throws BundleError: not a
// bundle, a manifest this release cannot read, or a file missing, truncated or corrupt, or not a regular file.
Bundle open_bundle(std::filesystem::path const& path, bool verify, std::optional<OpenedFiles> const& opened = {});

}  // namespace tide

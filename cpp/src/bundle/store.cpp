// Messages are those of tide_export/bundle/opened.py.
#include "bundle/store.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <system_error>
#include <utility>

#include "bundle/sha256.h"
#include "formatting.h"
#include "tide/errors.h"

#ifdef __APPLE__  // POSIX's names of a file's times
#define st_mtim st_mtimespec
#define st_ctim st_ctimespec
#endif

namespace tide {
namespace {

namespace fs = std::filesystem;

constexpr char const* kAdvice = "; export the bundle again or copy it anew";
constexpr std::int64_t kMaxManifest = 1 << 24;  // bytes; those of large models have about 1 MB
constexpr int kAttempts = 100;  // to open a bundle while exports replace it

std::string message_of(int error) { return std::generic_category().message(error); }

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  Descriptor(Descriptor const&) = delete;
  Descriptor& operator=(Descriptor const&) = delete;

  int get() const { return number_; }
  int release() { return std::exchange(number_, -1); }

 private:
  int number_;
};

// Opens a file relative to `folder`; no part of its path may be a symbolic link, and none makes the call wait.
int open_at(int folder, fs::path const& name) {
  std::unique_ptr<Descriptor> opened;
  for (fs::path const& part : name) {
    int const next = ::openat(opened ? opened->get() : folder, part.c_str(),
                              O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (next < 0) return next;
    opened = std::make_unique<Descriptor>(next);
  }
  return opened ? opened->release() : -1;
}

// All that there are, by the address of their first byte.
struct Mappings {
  std::mutex mutex;
  std::map<std::byte const*, Mapping const*> by_begin;

  static Mappings& all() {
    static Mappings& mappings = *new Mappings;  // some engines live until the process ends
    return mappings;
  }
};

[[noreturn]] void refuse_unreadable(fs::path const& path, int error) {
  throw BundleError("cannot read bundle file " + quoted(path) + ": " + message_of(error));
}

// Opens `name`, relative to the descriptor `folder`, without following a symbolic link. Throws BundleError: it is missing, a
// symbolic link, not a regular file or unreadable.
std::shared_ptr<BundleFile const> open_file(fs::path const& path, int folder, std::string const& name) {
  Descriptor const opened(open_at(folder, name));
  int const error = errno;
  if (opened.get() >= 0) return std::make_shared<BundleFile const>(path, opened.get());
  if (error == ENOENT || error == ENOTDIR) throw BundleError("bundle file " + quoted(path) + " is missing" + kAdvice);
  if (error != ELOOP) refuse_unreadable(path, error);
  throw BundleError("bundle file " + quoted(path) +
                    " is a symbolic link, or in a folder that is one: copy the bundle with the files themselves (cp -rL)");
}

Bundle bundle_of(fs::path const& path, std::string text, bool verify,
                 std::function<std::shared_ptr<BundleFile const>(std::string const& name)> const& open) {
  Bundle bundle{path, std::move(text), {}, {}};
  bundle.manifest = Manifest::from_json(bundle.manifest_text, quoted(path / kManifestFile));
  for (auto const& [name, expected] : bundle.manifest.files) bundle.files[name] = open(name);
  for (auto const& [name, expected] : bundle.manifest.files) bundle.files[name]->check(expected, verify);
  return bundle;
}

Bundle open_files(fs::path const& path, int folder, bool verify) {
  fs::path const source = path / kManifestFile;
  struct stat status {};
  if (::fstatat(folder, kManifestFile, &status, AT_SYMLINK_NOFOLLOW) != 0 && errno == ENOENT) {
    if (::faccessat(folder, "config.json", F_OK, 0) == 0) {
      throw BundleError(quoted(path) + " is a model, export it first: tide-export export " + path.string() + " -o BUNDLE");
    }
    throw BundleError(quoted(path) + " is not a bundle: it has no " + kManifestFile);
  }
  auto const file = open_file(source, folder, kManifestFile);
  if (file->size() > kMaxManifest) {
    throw BundleError(quoted(source) + " is too large: a manifest has at most " + std::to_string(kMaxManifest) + " bytes");
  }
  return bundle_of(path, file->read(), verify, [&](auto const& name) { return open_file(path / name, folder, name); });
}

Bundle given_files(fs::path const& path, OpenedFiles const& opened, bool verify) {
  return bundle_of(path, opened.manifest, verify, [&](auto const& name) {
    auto const given = opened.files.find(name);
    return std::make_shared<BundleFile const>(path / name, given == opened.files.end() ? -1 : given->second);
  });
}

bool was_replaced(fs::path const& path, int folder) {
  struct stat now {}, opened {};
  if (::stat(path.c_str(), &now) != 0 || ::fstat(folder, &opened) != 0) return true;
  return now.st_dev != opened.st_dev || now.st_ino != opened.st_ino;
}

}  // namespace

Mapping::Mapping(void* data, std::size_t size) : data_(data), size_(size) {
  std::lock_guard<std::mutex> const lock(Mappings::all().mutex);
  if (size_ > 0) Mappings::all().by_begin[this->data()] = this;
}

Mapping::~Mapping() {
  std::lock_guard<std::mutex> const lock(Mappings::all().mutex);
  if (size_ > 0) Mappings::all().by_begin.erase(data());
  if (size_ > 0) ::munmap(data_, size_);
}

void Mapping::forget(void const* part, std::size_t bytes) {
  std::lock_guard<std::mutex> const lock(Mappings::all().mutex);
  auto after = Mappings::all().by_begin.upper_bound(static_cast<std::byte const*>(part));
  if (after == Mappings::all().by_begin.begin()) return;
  Mapping const& mapping = *(--after)->second;
  if (part < mapping.data() + mapping.size()) mapping.forget_part(part, bytes);
}

void Mapping::forget_part(void const* part, std::size_t bytes) const {
  if (bytes == 0) return;
  static auto const kPage = static_cast<std::size_t>(::sysconf(_SC_PAGE_SIZE));
  std::size_t const start = static_cast<std::size_t>(static_cast<std::byte const*>(part) - data());
  std::size_t const begin = (start + kPage - 1) / kPage * kPage;  // whole pages
  std::size_t const end = start + bytes == size_ ? size_ : (start + bytes) / kPage * kPage;
  if (begin < end) ::madvise(data() + begin, end - begin, MADV_DONTNEED);
}

BundleFile::BundleFile(fs::path path, int descriptor) : path_(std::move(path)) {
  Descriptor opened(::fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
  if (opened.get() < 0) refuse_unreadable(path_, errno);
  struct stat status {};
  if (::fstat(opened.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
    throw BundleError("bundle file " + quoted(path_) + " is not a file");
  }
  size_ = status.st_size, seconds_ = status.st_mtim.tv_sec, nanoseconds_ = status.st_mtim.tv_nsec;
  descriptor_ = opened.release();
}

BundleFile::~BundleFile() { ::close(descriptor_); }

std::string BundleFile::identity() const {
  struct stat now {};
  if (::fstat(descriptor_, &now) != 0) refuse_unreadable(path_, errno);
  std::string text = std::to_string(now.st_dev) + ' ' + std::to_string(now.st_ino) + ' ' + std::to_string(now.st_size);
  for (timespec const& time : {now.st_mtim, now.st_ctim}) {
    text += ' ' + std::to_string(std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec);
  }
  return text;
}

std::string BundleFile::read() const {
  check_unchanged();
  std::string content(static_cast<std::size_t>(size_), '\0');
  content.resize(read_at(content.data(), content.size(), 0));
  check_unchanged();
  return content;
}

std::shared_ptr<Mapping const> BundleFile::map() const {
  check_unchanged();
  std::lock_guard<std::mutex> const lock(mutex_);
  std::shared_ptr<Mapping const> mapping = mapping_.lock();
  if (mapping) return mapping;
  auto const size = static_cast<std::size_t>(size_);
  if (size == 0) return std::make_shared<Mapping const>(nullptr, 0);  // no system maps nothing
  void* const data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor_, 0);
  if (data == MAP_FAILED) refuse_unreadable(path_, errno);
  mapping_ = mapping = std::make_shared<Mapping const>(data, size);
  return mapping;
}

void BundleFile::check_unchanged() const {
  struct stat status {};
  bool const known = ::fstat(descriptor_, &status) == 0;
  if (known && status.st_size == size_ && status.st_mtim.tv_sec == seconds_ && status.st_mtim.tv_nsec == nanoseconds_) {
    return;
  }
  throw BundleError("bundle file " + quoted(path_) +
                    " was changed after the bundle was loaded: load it again, and replace bundles instead of editing "
                    "them");
}

void BundleFile::check(FileInfo const& expected, bool verify) const {
  std::string const actual = std::to_string(size_), listed = std::to_string(expected.size);
  if (size_ < expected.size) {
    throw BundleError("bundle file " + quoted(path_) + " is truncated: " + actual + " of " + listed + " bytes" +
                      kAdvice);
  }
  if (size_ > expected.size) {
    throw BundleError("bundle file " + quoted(path_) + " has " + actual + " bytes instead of " + listed + kAdvice);
  }
  if (!verify) return;
  std::uint64_t at = 0;
  std::string const actual_sha256 = sha256([&](char* to, std::size_t size) {
    std::size_t const read = read_at(to, size, at);
    at += read;
    return read;
  });
  if (actual_sha256 != expected.sha256) {
    throw BundleError("bundle file " + quoted(path_) + " is corrupt: its sha256 is not the manifest's" + kAdvice);
  }
}

std::size_t BundleFile::read_at(char* to, std::size_t size, std::uint64_t at) const {
  std::size_t done = 0;
  while (done < size) {
    ssize_t const read = ::pread(descriptor_, to + done, size - done, static_cast<off_t>(at + done));
    if (read < 0 && errno == EINTR) continue;
    if (read < 0) refuse_unreadable(path_, errno);
    if (read == 0) break;
    done += static_cast<std::size_t>(read);
  }
  return done;
}

BundleFile const& Bundle::file(std::string const& name) const {
  auto const found = files.find(name);
  if (found == files.end()) throw BundleError("bundle " + quoted(path) + " has no file " + name);
  return *found->second;
}

void Bundle::check_weights() const {
  auto const weights = files.find(kWeightsFile);
  if (weights != files.end()) weights->second->check_unchanged();
}

Bundle open_bundle(fs::path const& path, bool verify, std::optional<OpenedFiles> const& opened) {
  if (opened) return given_files(path, *opened, verify);
  for (int attempt = 1;; ++attempt) {
    Descriptor const folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (folder.get() < 0) {
      int const error = errno;
      if (error == ENOENT) throw BundleError("bundle " + quoted(path) + " does not exist: `tide-export export MODEL -o " + path.string() + "` makes one");
      if (error == ENOTDIR) throw BundleError(quoted(path) + " is not a bundle: it has no " + kManifestFile);
      throw BundleError("cannot read bundle " + quoted(path) + ": " + message_of(error));
    }
    try {
      return open_files(path, folder.get(), verify);
    } catch (BundleError const&) {
      if (attempt == kAttempts || !was_replaced(path, folder.get())) throw;
    }
  }
}

}  // namespace tide
